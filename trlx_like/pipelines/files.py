"""Reading files of rows: text, JSON lines, JSON, CSV, TSV and Parquet.

CSV is read by the standard library and not by `datasets`, which guesses types ("007" becomes 7), knows no line numbers
for errors and copies every file to a cache. Parquet is read by pyarrow, without that copy.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError, DataError
from trlx_like.imports import install_hint


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8-sig")


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """Iterate over the lines that are not blank, with their numbers. Only \\n ends a line, not U+2028 and the like."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _txt(path: Path, option: str) -> tuple[list[Any], list[int]]:
    rows = list(_lines(path))
    return [line for _, line in rows], [number for number, _ in rows]


def _jsonl(path: Path, option: str) -> tuple[list[Any], list[int]]:
    values, lines = [], []
    for number, line in _lines(path):
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{option}: {path}:{number} is not JSON: {error}.") from None
        lines.append(number)
    return values, lines


def _json(path: Path, option: str) -> tuple[list[Any], None]:
    try:
        values = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{option}: {path}:{error.lineno} is not JSON: {error}.") from None
    except RecursionError:
        raise DataError(f"{option}: {path} is nested too deeply.") from None
    if not isinstance(values, list):
        raise DataError(f"{option}: {path} must hold a list of rows, not {described(values)}.")
    return values, None


def _csv(path: Path, option: str, dialect: str = "excel") -> tuple[list[Any], list[int]]:
    """Read a table whose cells are text, since CSV does not tell what a number or a missing cell is."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), dialect, strict=True)
    values, lines = [], []
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns) or not all(columns):
            raise DataError(f"{option}: {path}:1 must name every column once, not {', '.join(map(repr, columns))}.")
        for cells in reader:
            if cells and len(cells) != len(columns):
                raise DataError(
                    f"{option}: {path}:{reader.line_num} has {len(cells)} cells for {len(columns)} columns."
                )
            if cells:
                values.append(dict(zip(columns, cells, strict=True)))
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{option}: {path}:{reader.line_num} is not CSV: {error}.") from None
    return values, lines


def _parquet(path: Path, option: str) -> tuple[list[Any], None]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise missing_packages(option, "a .parquet file", error) from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{option}: {path} is not a Parquet file: {error}") from error
    return rows, None


READERS: dict[str, Callable[[Path, str], tuple[list[Any], list[int] | None]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, dialect="excel-tab"),
    ".parquet": _parquet,
}
"""By suffix: a function of a path and an option (for errors) that returns the rows, and their lines if it has any."""


def described(value: Any) -> str:
    """Describe a value in a few words, in JSON's terms."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, islice(value, 8))) or 'no keys'}"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."
    return f"a {type(value).__name__}"


def missing_packages(option: str, what: str, error: ImportError) -> ConfigError:
    """Make the error that names the extra to install."""
    return ConfigError(f"{option}: {what} needs packages that are not installed ({error}): {install_hint('datasets')}.")
