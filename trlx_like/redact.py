"""Hide secrets in everything that is written or shown: configurations, messages, reports and trackers.

A secret is recognised by its key (api_key, password, headers), by its place (the user part of a URL), or by its form
(sk-..., hf_..., a JSON web token). No rule finds all secrets, so keep them in environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

HIDDEN = "<redacted>"
"""The text that replaces a secret."""

_WORDS = (
    r"(?:(?:api|access|secret|private|signing)[_-]?key|secret|passw(?:or)?d|passphrase|credentials?|authorization"
    r"|(?:auth|access|api|bearer|refresh|session|hf|hub)[_-]?token)"
)
_NAME = re.compile(rf"(?:^|[_.\s-])(?:{_WORDS}|cookie)$", re.IGNORECASE)
_HEADERS = re.compile(r"(?:^|[_-])headers?$", re.IGNORECASE)
_LONG = re.compile(r"\S{16,}")  # what makes a secret of a value named `token`, which is a word of tokenizers too
_TEXTS = [
    re.compile(r"(?P<kept>://)[^\s/?#\"'<>]{1,500}(?=@)"),  # user and password of a URL
    re.compile(rf"(?P<kept>{_WORDS}[\"']?\s*=\s*[\"']?)[^\s\"'&,;)}}\]<]+", re.IGNORECASE),  # of a query, of --set
    re.compile(r"(?P<kept>\btoken=[\"']?)[^\s\"'&,;)}\]<]{16,}", re.IGNORECASE),
    re.compile(rf"(?P<kept>{_WORDS}[\"']\s*:\s*b?[\"'])(?!<redacted)[^\"']+", re.IGNORECASE),  # of JSON, of a dict
    re.compile(
        rf"^(?P<kept>[ \t-]*[\w-]*{_WORDS}[ \t]*:[ \t]+)(?!<redacted)\S+(?=[ \t]*$)", re.IGNORECASE | re.MULTILINE
    ),
    re.compile(r"(?P<kept>(?<![\w.])(?:authorization|x-api-key|cookie):[ \t]*)[^\s\"'<][^\r\n\"'<]*", re.IGNORECASE),
    re.compile(r"(?P<kept>\b(?:bearer|basic)\s+)(?=\S*\d)[\w.~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"(?P<kept>(?<![\w-]))(?:sk|pk|rk)-(?=[\w-]*\d)[\w-]{16,}"),
    re.compile(
        r"(?P<kept>\b)(?:hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,})"
    ),
    re.compile(r"(?P<kept>\b)(?:AKIA[0-9A-Z]{16}\b|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"),
    re.compile(r"(?P<kept>-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)[^-]+"),
]

T = TypeVar("T")


def redacted(value: T, name: str = "") -> T:
    """Return a value in which `HIDDEN` replaces every secret.

    Args:
        value: A text, or mappings and lists of any depth, which are copied. Other objects are returned as they are.
        name: The key of the value.
    """
    return cast(T, _redacted(value, name, False))


def _redacted(value: Any, name: str, in_headers: bool) -> Any:
    if isinstance(value, Mapping):
        inside = in_headers or bool(_HEADERS.search(name))
        return {key: _redacted(item, str(key), inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_redacted(item, name, in_headers) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    if value != "" and (in_headers or names_secret(name)):
        return HIDDEN
    if not isinstance(value, str):
        return value
    if name.lower() == "token" and _LONG.fullmatch(value):
        return HIDDEN
    for pattern in _TEXTS:
        value = pattern.sub(rf"\g<kept>{HIDDEN}", value)
    return value


def names_secret(name: str) -> bool:
    """Return whether a key is the name of a secret, such as `apiKey` or `client_secret`, but not `api_key_env`."""
    return bool(_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)))


def secrets_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each secret in nested mappings and lists, as a tuple of keys."""
    for (place, before), (_, after) in zip(leaves(value), leaves(redacted(value)), strict=True):
        if after is not before and after == HIDDEN or isinstance(before, str) and after != before:
            yield place


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values in nested mappings and lists that are neither, each with its keys from the outside in."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value
