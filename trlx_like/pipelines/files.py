"""Reading files of rows: text, JSON lines, JSON, CSV, TSV and Parquet.

CSV is read by the standard library and not by `datasets`, which guesses types ("007" becomes 7), knows no line numbers
for errors and copies every file to a cache. Parquet is read by pyarrow, without that copy. All but .json, which is one
value, are read row by row.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from trlx_like.errors import DataError
from trlx_like.imports import needed
from trlx_like.pipelines.prepared import CHUNK
from trlx_like.pipelines.rows import LONGEST_TEXT
from trlx_like.reading import check_regular, read_bytes

Line = int | None  # of a row, from 1; None in a file without lines


def _lines(path: Path, newline: str) -> Iterator[str]:
    """Iterate over the lines of a file, each with its end; `newline` is that of `open`."""
    data = read_bytes(path)
    try:
        yield from io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=newline)
    except UnicodeDecodeError:
        data.decode("utf-8-sig")  # raises the error with its place in the whole file
        raise


def _txt(path: Path, option: str) -> Iterator[tuple[Line, str]]:
    """Read the lines that are not blank. Only \\n ends a line, not U+2028 and the like, which may be part of text."""
    for number, line in enumerate(_lines(path, "\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\n").removesuffix("\r")


def _jsonl(path: Path, option: str) -> Iterator[tuple[Line, Any]]:
    for number, line in _txt(path, option):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(f"{option}: {path}:{number} is not JSON: {why}.") from None


def _json(path: Path, option: str) -> Iterator[tuple[Line, Any]]:
    text = read_bytes(path).decode("utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{option}: {path}:{error.lineno} is not JSON: {error}.") from None
    except RecursionError:
        raise DataError(f"{option}: {path} is nested too deeply.") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise DataError(f"{option}: {path} is not JSON: {error}.") from None
    if not isinstance(values, list):
        raise DataError(f"{option}: {path} must hold a list of rows, not {described(values)}.")
    yield from ((None, value) for value in values)


def _csv(path: Path, option: str, dialect: str = "excel") -> Iterator[tuple[Line, dict[str, str]]]:
    """Read a table whose cells are text, since CSV does not tell what a number or a missing cell is."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_TEXT))  # for all readers: a reader has none of its own
    reader = csv.reader(_lines(path, ""), dialect, strict=True)
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns) or not all(columns):
            raise DataError(f"{option}: {path}:1 must name every column once, not {', '.join(map(repr, columns))}.")
        if len(columns) == 1 and ";" in columns[0]:
            raise DataError(f"{option}: {path}:1 has one column, {columns[0]!r}; separate columns by commas.")
        for cells in filter(None, reader):
            if len(cells) != len(columns):
                found = f"{len(cells)} cells for {len(columns)} columns"
                raise DataError(f"{option}: {path}:{reader.line_num} has {found}.")
            yield reader.line_num, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{option}: {path}:{reader.line_num} is not CSV: {error}.") from None


def _parquet(path: Path, option: str) -> Iterator[tuple[Line, Any]]:
    with needed(f"{option}: a .parquet file needs packages that are not installed", "datasets"):
        from pyarrow import ArrowException, parquet
    check_regular(path)
    try:
        with parquet.ParquetFile(path) as file:
            yield from ((None, row) for part in file.iter_batches(CHUNK) for row in part.to_pylist())
    except ArrowException as error:
        raise DataError(f"{option}: {path} is not a Parquet file: {' '.join(str(error).split())}") from error


READERS: dict[str, Callable[[Path, str], Iterator[tuple[Line, Any]]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, dialect="excel-tab"),
    ".parquet": _parquet,
}
"""By suffix: a function of a path and an option (for errors) that iterates over rows and their lines."""


def described(value: Any) -> str:
    """Describe a value in a few words, in JSON's terms."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, islice(value, 8))) or 'no keys'}"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."
    return f"a {type(value).__name__}"
