"""Writes what type checkers and editors read about the public names, from the table of algorithms.

    .venv/bin/python scripts/exports.py

`trlx_like/__init__.pyi` is written whole, and in `trlx_like/config/__init__.py` the imports of the methods' options. A
test fails when either is not up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import trlx_like
from trlx_like.algorithms import ALGORITHMS

PACKAGE = Path(trlx_like.__file__).parent
STUB = PACKAGE / "__init__.pyi"
CONFIG = PACKAGE / "config" / "__init__.py"
METHODS = re.compile(r"(from trlx_like\.config\.methods\..*\n)+")


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


def texts() -> dict[Path, str]:
    """Return what both files should contain."""
    rows = sorted(ALGORITHMS, key=lambda row: row.name)
    methods = "".join(f"from trlx_like.{row.exports[row.method]} import {row.method} as {row.method}\n" for row in rows)
    return {
        STUB: "\n".join(stub()).rstrip() + "\n",
        CONFIG: METHODS.sub(methods, CONFIG.read_text(encoding="utf-8"), count=1),
    }


def main() -> None:
    """Write the files that are not up to date."""
    for file, text in texts().items():
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"{file.relative_to(PACKAGE.parent)} is up to date now")


if __name__ == "__main__":
    main()
