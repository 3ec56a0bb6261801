"""Writes what type checkers and editors read about the public names, from the table of algorithms.

    .venv/bin/python scripts/exports.py

`trlx_like/__init__.pyi` is written whole. A test fails when it is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import trlx_like
from trlx_like.algorithms import ALGORITHMS

PACKAGE = Path(trlx_like.__file__).parent
STUB = PACKAGE / "__init__.pyi"


def stub() -> Iterator[str]:
    """Yield the lines of `trlx_like/__init__.pyi`."""
    yield "# ruff: noqa: I001\n# Written by scripts/exports.py."
    names: dict[str, str] = vars(trlx_like)["_NAMES"]
    for name, module in sorted(names.items(), key=lambda item: (item[1], item[0])):
        if module != "presets":
            yield f"from trlx_like.{module} import {name} as {name}"
    yield ""
    for row in ALGORITHMS:
        yield from (f"{alias} = {row.trainer}" for alias in row.aliases)
    yield "\n__version__: str\n"
    for row in ALGORITHMS:
        yield f'def {row.default}() -> TRLConfig:\n    """{row.summary}"""\n'


def main() -> None:
    """Write the file if it is not up to date."""
    text = "\n".join(stub())
    if not STUB.is_file() or STUB.read_text(encoding="utf-8") != text:
        STUB.write_text(text, encoding="utf-8")
        print(f"{STUB.relative_to(PACKAGE.parent)} is up to date now")


if __name__ == "__main__":
    main()
