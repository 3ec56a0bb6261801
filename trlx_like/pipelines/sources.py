"""Where a YAML file says its data is: files, Python functions and datasets, read as rows.

What a source is follows from how it is written, by the first of these that fits:

1. A list is the rows themselves.
2. It ends in .txt, .jsonl, .json, .csv, .tsv or .parquet: a file.
3. `path/to/file.py:function` or `package.module:function`: a function, called without arguments, that returns the
   rows. So is `name:function` if there is a module `name` here.
4. `name`, `owner/name` or a folder, and after a colon the split (by default train): what `datasets.load_dataset` finds
   there. The split may be cut: `imdb:train[:100]`.

Rows of tables are dicts from column to cell, those of JSON what the JSON says. Where all rows have the same single
column, they are its cells.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from trlx_like.errors import ConfigError, DataError, TrlxError
from trlx_like.imports import import_name, install_hint, is_python_name, raised

_DATASET = re.compile(r"(?P<name>(?:[A-Za-z]:[\\/])?[^:]+)(?::(?P<split>[^\\/]+))?")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass
class _Rows:
    """Rows, and how errors name the place of each of them."""

    source: str
    values: list[Any]
    lines: list[int] | None = None  # of a text file, from 1

    def place(self, row: int) -> str:
        return f"{self.source}[{row}]" if self.lines is None else f"{self.source}:{self.lines[row]}"


def load_rows(spec: Any, option: str) -> list[Any]:
    """The rows of a source, as the opening of this file says. Rewards are numbers, or have a column "reward" of them.

    option: the dotted option that errors name (`data.prompts`); its last part says what the rows are for. ConfigError
    for a source that cannot be found or read, DataError with file and line for a row that cannot be used.
    """
    if isinstance(spec, list):
        return _checked(_Rows(option, list(spec)), option, from_python=False)
    kind = _kind(spec, option)
    read = {"file": _read_file, "function": _call, "dataset": _load_dataset}[kind]
    return _checked(read(spec, option), option, from_python=kind == "function")


def check_source(spec: Any, option: str) -> str:
    """What a source brings, in a few words, without calling a function or using the network. Raises as `load_rows`."""
    if isinstance(spec, list) or _kind(spec, option) == "file":
        count = len(load_rows(spec, option))
        return f"{count} row{'s' * (count != 1)}" + (f" of {spec}" if isinstance(spec, str) else "")
    if _kind(spec, option) == "function":
        load_function(spec, option)
        return f"what {spec} returns"
    _datasets(option)
    return f"dataset {spec}"


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names. Modules are looked for here too.

    ConfigError if it cannot be found, is not a function, or its module raises when it is imported.
    """
    function = import_name(spec, option)
    if not callable(function):
        raise ConfigError(f"{option} ({spec!r}) must be a function, not a {type(function).__name__}.")
    wanted: Callable[..., Any] = function
    return wanted


def _kind(spec: str, option: str) -> Literal["file", "function", "dataset"]:
    path = Path(os.path.expanduser(spec))
    if path.suffix.lower() in _READERS:
        return "file"
    if path.is_file():
        raise ConfigError(f"{option} ({spec!r}): a file of data must end in {_listed(_READERS)}.")
    if is_python_name(spec) and _is_python(spec.rpartition(":")[0]):
        return "function"
    match = _DATASET.fullmatch(spec)
    if match and (_HUB_NAME.fullmatch(match["name"]) or Path(os.path.expanduser(match["name"])).is_dir()):
        return "dataset"
    raise ConfigError(
        f"{option} ({spec!r}) must be a file ({_listed(_READERS)}), module:function, path/to/file.py:function, or the "
        "name of a dataset or its folder, with :split after it."
    )


def _is_python(place: str) -> bool:
    """Whether the part before the colon is a .py file or a module, and not the name of a dataset."""
    if place.endswith(".py") or "." in place or place in sys.modules:
        return True
    found = PathFinder.find_spec(place, [str(Path.cwd()), *sys.path])
    return found is not None and found.loader is not None  # without one it is any folder


# Files. A reader returns rows and, where the file has lines, the line of each.


def _read_file(spec: str, option: str) -> _Rows:
    path = Path(os.path.expanduser(spec))
    try:
        values, lines = _READERS[path.suffix.lower()](path, option)
    except FileNotFoundError:
        raise ConfigError(f"{option} ({spec!r}): there is no such file in {Path.cwd()}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{option} ({spec!r}) is a folder.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{option}: {spec} is not UTF-8 text (byte {error.start}).") from None
    except OSError as error:
        raise ConfigError(f"{option} ({spec!r}) cannot be read: {error}") from error
    return _Rows(spec, _without_column(values), lines)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8-sig")


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """The lines that are not blank, with their numbers. Other line separators of Unicode may be part of the text."""
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
        raise DataError(f"{option}: {path} must hold a list of rows, not {_named(values)}.")
    return values, None


def _csv(path: Path, option: str, dialect: str = "excel") -> tuple[list[Any], list[int]]:
    """Cells are text: what a number or a missing cell is, CSV does not say."""
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


def _tsv(path: Path, option: str) -> tuple[list[Any], list[int]]:
    return _csv(path, option, "excel-tab")


def _parquet(path: Path, option: str) -> tuple[list[Any], None]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise _missing(option, "a .parquet file", error) from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise DataError(f"{option}: {path} is not a Parquet file: {error}") from error
    return rows, None


_READERS: dict[str, Callable[[Path, str], tuple[list[Any], list[int] | None]]] = {
    ".txt": _txt,
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}


# Functions and datasets.


def _call(spec: str, option: str) -> _Rows:
    function = load_function(spec, option)
    try:
        returned = function()
        values = None if isinstance(returned, (str, bytes, dict)) else list(returned)
    except TrlxError:
        raise
    except Exception as error:
        raise DataError(f"{option}: {spec}() must return a list of rows. {raised(error)}") from error
    if values is None:
        raise DataError(f"{option}: {spec}() must return a list of rows, not {_named(returned)}.")
    return _Rows(f"{spec}()", values)


def _load_dataset(spec: str, option: str) -> _Rows:
    datasets = _datasets(option)
    match = _DATASET.fullmatch(spec)
    assert match is not None
    name = match["name"]
    folder = Path(os.path.expanduser(name))
    try:
        rows = datasets.load_dataset(str(folder) if folder.is_dir() else name, split=match["split"] or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        found = (
            "" if folder.is_dir() else f" There is no file, folder or module {name} here, and as a dataset of the hub:"
        )
        raise ConfigError(f"{option} ({spec!r}) cannot be loaded.{found} {_first_line(error)}") from error
    return _Rows(spec, _without_column(list(rows)))


def _datasets(option: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise _missing(option, "a dataset", error) from error
    return datasets


# Rows.


def _without_column(rows: list[Any]) -> list[Any]:
    """The cells of the only column, if all rows are dicts with that one key."""
    columns = next((tuple(row) for row in rows if isinstance(row, dict)), ())
    if len(columns) != 1 or not all(isinstance(row, dict) and tuple(row) == columns for row in rows):
        return rows
    return [row[columns[0]] for row in rows]


def _checked(rows: _Rows, option: str, *, from_python: bool) -> list[Any]:
    """The rows, if they can be used. What a function returns is left to the pipeline, which may be the user's own."""
    if not rows.values:
        raise DataError(f"{option}: {rows.source} has no rows.")
    check = _CHECKS.get(option.rpartition(".")[2])
    if check is None or (from_python and check is not _number):
        return rows.values
    checked = []
    for number, value in enumerate(rows.values):
        try:
            checked.append(check(value))
        except (TypeError, ValueError, OverflowError):
            wanted = _WANTED[check]
            raise DataError(f"{option}: {rows.place(number)} must be {wanted}, not {_named(value)}.") from None
    return checked


def _prompt(value: Any) -> Any:
    prompt = value.get("prompt") if isinstance(value, dict) else value
    messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if not (isinstance(prompt, str) or messages):
        raise ValueError
    return value


def _sample(value: Any) -> Any:
    if not isinstance(value, (str, list, dict)):
        raise ValueError
    return value


def _preference(value: Any) -> Any:
    whole = isinstance(value, list) and len(value) == 3
    if not (whole or (isinstance(value, dict) and {"chosen", "rejected"} <= value.keys())):
        raise ValueError
    return value


def _number(value: Any) -> float | list[float]:
    given: Any = value.get("reward") if isinstance(value, dict) else value
    if isinstance(given, list):
        return [_finite(number) for number in given]
    return _finite(given)


def _finite(value: Any) -> float:
    number = float("nan") if isinstance(value, bool) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "prompts": _prompt,
    "eval_prompts": _prompt,
    "samples": _sample,
    "rewards": _number,
    "preferences": _preference,
    "eval_preferences": _preference,
}
_WANTED: dict[Callable[[Any], Any], str] = {
    _prompt: 'text or messages, or have either under "prompt"',
    _sample: "text, a list of texts, or an object",
    _preference: "an object with chosen and rejected, or a list of prompt, chosen and rejected",
    _number: 'a finite number, or have one under "reward"',
}


# Words.


def _named(value: Any) -> str:
    """A value in a few words, JSON's rather than Python's."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(str, islice(value, 8))) or 'no keys'}"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:37]!r}..."
    return f"a {type(value).__name__}"


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _missing(option: str, what: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{option}: {what} needs packages that are not installed ({error}): {install_hint('datasets')}.")
