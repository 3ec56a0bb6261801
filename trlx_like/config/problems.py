"""Describe mistakes in a configuration: the key, the allowed values, and the given value.

Sections report `Problem`s; only the reader of a YAML file knows on which line each one stands.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator

from trlx_like.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """Describe one mistake in a configuration: its place (`("train", "seed")`) and a sentence about it."""

    path: tuple[Any, ...]
    sentence: str

    @property
    def key(self) -> str:
        """Return the dotted key: `train.seed`."""
        return ".".join(str(part) for part in self.path)

    def __str__(self) -> str:
        return f"{self.key}: {self.sentence}" if self.path else self.sentence


def at(option: str, sentence: str) -> Problem:
    """Return the problem of a dotted option, such as "train.seed"."""
    return Problem(tuple(option.split(".")), sentence)


class UnknownKey(Problem):
    """Describe a key that is not in its section, but perhaps in another one."""


class InvalidConfig(ConfigError):
    """Report a configuration with problems, one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Accepts:
    """Describe in `Annotated[...]` the kinds of values that a field accepts, if its type does not say so."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds


def only(fits: Callable[[Any], object]) -> AfterValidator:
    """Make a validator for `Annotated[...]` that refuses the values that do not fit."""

    def checked(value: Any) -> Any:
        if not fits(value):
            raise ValueError
        return value

    return AfterValidator(checked)


def shown(value: Any) -> str:
    """Return a value as YAML would write it, shortened to fit a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(words: Sequence[str]) -> str:
    """Join words as `a, b or c`."""
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return in words what a type and its bounds allow: `a whole number of at least 1 or null`."""
    return listed(_alternatives(annotation, list(metadata)))


def _alternatives(annotation: Any, metadata: list[Any]) -> list[str]:
    says = [kind for item in metadata if isinstance(item, Accepts) for kind in item.kinds]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if says:
        return says
    if origin is Annotated:
        bounds = [bound for item in arguments[1:] for bound in getattr(item, "metadata", [item])]  # of a Field
        return _alternatives(arguments[0], [*metadata, *bounds])
    if origin is Union or origin is types.UnionType:
        return [words for one in arguments for words in _alternatives(one, metadata)]
    if origin is Literal:
        return [shown(one) for one in arguments]
    if annotation is int or annotation is float:
        return [("a whole number" if annotation is int else "a number") + _bounds(metadata)]
    if origin is list:
        return ["a list of texts" if arguments == (str,) else "a list"]
    words = {type(None): "null", bool: "true or false", str: "text", list: "a list"}
    return [words.get(annotation, "a mapping of settings" if annotation is not Any else "set")]


def _bounds(metadata: Iterable[Any]) -> str:
    found = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le", "lt") if hasattr(item, name)}
    if found.keys() == {"ge", "le"}:
        return f" from {found['ge']} to {found['le']}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return "".join(f" {words[name]} {bound}" for name, bound in found.items())
