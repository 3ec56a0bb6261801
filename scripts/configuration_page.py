"""Writes the option tables of the pages in docs/ from the sections' fields: type, bounds, default and docstring.

    .venv/bin/python scripts/configuration_page.py

A page has `<!-- options: train -->` and `<!-- end of options -->` around each table, with the name of a section or of a
method's configuration. All else in the pages is written by hand. A test fails when a table is not up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from trlx_like.config import METHODS, MethodConfig, Section, TRLConfig
from trlx_like.config.problems import expected
from trlx_like.config.resume import rule_of
from trlx_like.config.schema import meanings

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every table made anew."""
    known = sections()
    return BLOCK.sub(lambda block: block[1] + "\n".join(table(known[block[2]])) + "\n" + block[3], page)


def sections() -> dict[str, type[Section]]:
    """What a table can be of: the sections by name, and the configurations of the package's own methods."""
    found = TRLConfig.sections()
    methods = [METHODS.get(name) for name in METHODS.names()]
    found |= {method.__name__: method for method in methods if method.__module__.startswith("trlx_like.")}
    del found["method"]  # which options it has depends on the method
    return found


def table(section: type[Section]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    about = meanings(section)
    yield "| option | takes | default | meaning | on resume |"
    yield "|---|---|---|---|---|"
    for name, field in section.model_fields.items():
        takes = expected(field.annotation, field.metadata)
        cells = [
            f"`{name}`",
            "anything" if takes == "set" else takes,
            _default(section, name, field),
            about[name],
            _on_resume(field),
        ]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _on_resume(field: FieldInfo) -> str:
    """What becomes of a change of the option when a run is resumed."""
    rule = rule_of(field)
    if not rule.compared:
        return "free"
    refused = "applied" if rule.refused is None else "refused"
    return f"{', '.join(rule.applied_keys)} applied, others {refused}" if rule.applied_keys else refused


def _default(section: type[Section], name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if name == "name" and issubclass(section, MethodConfig):
        return f"`{section.__name__}`"
    others = {other: given.get_default() for other, given in section.model_fields.items()}
    return f"`{json.dumps(field.get_default(call_default_factory=True, validated_data=others))}`"


def main() -> None:
    for file in sorted(DOCS.rglob("*.md")):
        present = file.read_text(encoding="utf-8")
        if filled(present) != present:
            file.write_text(filled(present), encoding="utf-8")
            print(f"{file.relative_to(DOCS.parent)} is up to date now")


if __name__ == "__main__":
    main()
