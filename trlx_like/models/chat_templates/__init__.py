"""The chat templates that `tokenizer.chat_template` knows by name, with marks around what the assistant says."""

from __future__ import annotations

from pathlib import Path

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("*.jinja")))
"""The names of the templates."""


def named_template(name: str) -> str:
    """Return the text of a template by its name, one of `NAMES`."""
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")
