"""Writes the tables of docs/configuration.md from the sections' own fields: type, bounds, default and docstring.

    .venv/bin/python scripts/configuration_page.py

What stands above the marker in the page is written by hand and stays. A test fails when the rest is not up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from trlx_like.cli import _meanings
from trlx_like.config import METHODS, MethodConfig, Section, TRLConfig
from trlx_like.config.problems import expected

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
MARKER = "<!-- What follows is written by scripts/configuration_page.py. -->\n"


def page(present: str) -> str:
    """The whole page: the present one down to the marker, then the tables."""
    by_hand, marker, _ = present.partition(MARKER)
    if not marker:
        raise SystemExit(f"{PAGE} lacks the line {MARKER.strip()}")
    return by_hand + MARKER + "\n".join(_tables()) + "\n"


def _tables() -> Iterator[str]:
    meanings = _meanings(TRLConfig)
    for name, field in TRLConfig.model_fields.items():
        yield f"\n## `{name}`\n"
        yield meanings[name]
        section = field.annotation
        if section is MethodConfig:
            yield from _methods()
        elif isinstance(section, type) and issubclass(section, Section):
            yield from _table(section)
        else:
            yield f"\nTakes {_words(field)}; default `{_default(field, {})}`."


def _methods() -> Iterator[str]:
    """One table a method of the package; those of plugins are not ours to document."""
    for method in (METHODS.get(name) for name in METHODS.names()):
        if method.__module__.startswith("trlx_like."):
            yield f"\n### `{method.__name__}`\n"
            yield " ".join((method.__doc__ or "").split())
            yield from _table(method)


def _table(section: type[Section]) -> Iterator[str]:
    meanings = _meanings(section)
    values: dict[str, object] = {"name": section.__name__} if issubclass(section, MethodConfig) else {}
    yield "\n| option | takes | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        default = values.get(name) or (None if field.is_required() else field.get_default())
        values[name] = default
        shown = "required" if field.is_required() else f"`{_default(field, values)}`"
        cells = [f"`{name}`", _words(field), shown, meanings[name]]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _words(field: FieldInfo) -> str:
    words = expected(field.annotation, field.metadata)
    return "anything" if words == "set" else words


def _default(field: FieldInfo, values: dict[str, object]) -> str:
    default = field.get_default(call_default_factory=True, validated_data=values)
    return json.dumps(default or values.get("name") if default == "" else default)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
