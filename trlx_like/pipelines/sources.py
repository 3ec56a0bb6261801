"""Reading the data that a YAML file names: files, Python functions and datasets, as lists of rows.

The kind of a source follows from how it is written, by the first of these that fits:

1. A list holds the rows themselves.
2. A name that ends in .txt, .jsonl, .json, .csv, .tsv or .parquet is a file.
3. `path/to/file.py:function` and `package.module:function` are functions, called without arguments, that return the
   rows. So is `name:function` if a module `name` can be imported.
4. `name`, `owner/name` or a folder, optionally with `:split` (train by default), is loaded by `datasets.load_dataset`.
   The split may be a slice: `imdb:train[:100]`.

A row of a table is a dict from column to cell; a row of JSON is the JSON value. If all rows have the same single
column, its cells are the rows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from trlx_like.errors import ConfigError, DataError, TrlxError
from trlx_like.imports import import_name, is_python_name, raised
from trlx_like.pipelines.files import READERS, described, missing_packages
from trlx_like.pipelines.returns import finite
from trlx_like.pipelines.rows import is_messages, unusable_text

_DATASET = re.compile(r"(?P<name>(?:[A-Za-z]:[\\/])?[^:]+)(?::(?P<split>[^\\/]+))?")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass
class _Rows:
    """Rows, with the place of each for errors."""

    source: str
    values: list[Any]
    lines: list[int | None] | None = None  # of each row, in a text file; counted from 1

    def place(self, row: int) -> str:
        line = self.lines and self.lines[row]
        return f"{self.source}:{line}" if line else f"{self.source}[{row}]"


def load_rows(spec: Any, option: str) -> list[Any]:
    """Load the rows of a source; the module's docstring lists the kinds of sources.

    Args:
        spec: The source.
        option: The dotted option, for errors (`data.prompts`). Its last part decides how the rows are checked; rewards
            are converted to numbers, taken from the column "reward" if there are columns.

    Returns:
        The rows, at least one.

    Raises:
        ConfigError: The source cannot be found or read.
        DataError: A row cannot be used. The error names file and line.
    """
    if isinstance(spec, list):
        return _checked(_Rows(option, list(spec)), option, from_python=False)
    kind = _kind(spec, option)
    read = {"file": _read_file, "function": _call, "dataset": _load_dataset}[kind]
    return _checked(read(spec, option), option, from_python=kind == "function")


def check_source(spec: Any, option: str) -> tuple[str, list[Any]]:
    """Describe a source in a few words, without calling a function or using the network.

    Returns:
        The words, and the rows of a file or a list; no rows of other sources.

    Raises:
        ConfigError: As `load_rows`.
        DataError: As `load_rows`, for files and lists.
    """
    if isinstance(spec, list) or _kind(spec, option) == "file":
        rows = load_rows(spec, option)
        of = f" of {spec}" if isinstance(spec, str) else ""
        return f"{len(rows)} row{'s' * (len(rows) != 1)}{of}", rows
    if _kind(spec, option) == "function":
        load_function(spec, option)
        return f"what {spec} returns", []
    _datasets(option)
    return f"dataset {spec}", []


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """Import the function that `module:function` or `path/to/file.py:function` names.

    Modules are also looked for in the current folder.

    Raises:
        ConfigError: It cannot be found, is not a function, or its module raises when it is imported.
    """
    function = import_name(spec, option)
    if not callable(function):
        raise ConfigError(f"{option} ({spec!r}) must be a function, not a {type(function).__name__}.")
    wanted: Callable[..., Any] = function
    return wanted


def _kind(spec: str, option: str) -> Literal["file", "function", "dataset"]:
    path = Path(os.path.expanduser(spec))
    if path.suffix.lower() in READERS:
        return "file"
    if path.is_file():
        raise ConfigError(f"{option} ({spec!r}): a file of data must end in {_listed(READERS)}.")
    if is_python_name(spec) and _is_python(spec.rpartition(":")[0]):
        return "function"
    match = _DATASET.fullmatch(spec)
    if match and (_HUB_NAME.fullmatch(match["name"]) or Path(os.path.expanduser(match["name"])).is_dir()):
        return "dataset"
    raise ConfigError(
        f"{option} ({spec!r}) must be a file ({_listed(READERS)}), module:function, path/to/file.py:function, or the "
        "name of a dataset or its folder, with :split after it."
    )


def _is_python(place: str) -> bool:
    """Tell whether the part before the colon is a .py file or a module, and not the name of a dataset."""
    if place.endswith(".py") or "." in place or place in sys.modules:
        return True
    found = PathFinder.find_spec(place, [str(Path.cwd()), *sys.path])
    return found is not None and found.loader is not None  # without a loader it is just a folder


def _read_file(spec: str, option: str) -> _Rows:
    path = Path(os.path.expanduser(spec))
    try:
        rows = list(READERS[path.suffix.lower()](path, option))
    except FileNotFoundError:
        raise ConfigError(f"{option} ({spec!r}): there is no such file in {Path.cwd()}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{option} ({spec!r}) is a folder.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{option}: {spec} is not UTF-8 text (byte {error.start}).") from None
    except OSError as error:
        raise ConfigError(f"{option} ({spec!r}) cannot be read: {error.strerror or error}.") from error
    return _Rows(spec, _without_column([value for _, value in rows]), [line for line, _ in rows])


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
        raise DataError(f"{option}: {spec}() must return a list of rows, not {described(returned)}.")
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
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"{option} ({spec!r}) cannot be loaded.{found} {why}") from error
    return _Rows(spec, _without_column(list(rows)))


def _datasets(option: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_packages(option, "a dataset", error) from error
    return datasets


# Rows.


def _without_column(rows: list[Any]) -> list[Any]:
    """Return the cells of the only column if all rows are dicts with the same single key, else the rows."""
    columns = next((tuple(row) for row in rows if isinstance(row, dict)), ())
    if len(columns) != 1 or not all(isinstance(row, dict) and tuple(row) == columns for row in rows):
        return rows
    return [row[columns[0]] for row in rows]


def _checked(rows: _Rows, option: str, *, from_python: bool) -> list[Any]:
    """Return the rows if they can be used. Rows of a function are left to the pipeline, which may be the user's own."""
    if not rows.values:
        raise DataError(f"{option}: {rows.source} has no rows.")
    purpose = option.rpartition(".")[2].removeprefix("eval_")
    if purpose not in _FORMS or (from_python and purpose != "rewards"):
        return rows.values
    read, wanted = _FORMS[purpose]
    checked = []
    for number, value in enumerate(rows.values):
        try:
            if why := unusable_text(value):
                raise DataError(f"{option}: {rows.place(number)}: {why}.")
            checked.append(read(value))
        except (TypeError, ValueError, OverflowError):
            raise DataError(f"{option}: {rows.place(number)} must be {wanted}, not {described(value)}.") from None
    return checked


def _accept(value: Any, usable: bool) -> Any:
    if not usable:
        raise ValueError
    return value


def _prompt(value: Any) -> Any:
    prompt = value.get("prompt") if isinstance(value, dict) else value
    return _accept(value, isinstance(prompt, str) or is_messages(prompt))


def _sample(value: Any) -> Any:
    return _accept(value, isinstance(value, (str, list, dict)))


def _preference(value: Any) -> Any:
    whole = isinstance(value, list) and len(value) == 3
    return _accept(value, whole or (isinstance(value, dict) and {"chosen", "rejected"} <= value.keys()))


def _reward(value: Any) -> float | list[float]:
    reward: Any = value.get("reward") if isinstance(value, dict) else value
    return [finite(number) for number in reward] if isinstance(reward, list) else finite(reward)


_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "prompts": (_prompt, 'text or messages, or have either under "prompt"'),
    "samples": (_sample, "text, a list of texts, or an object"),
    "rewards": (_reward, 'a finite number, or have one under "reward"'),
    "preferences": (_preference, "an object with chosen and rejected, or a list of prompt, chosen and rejected"),
}
"""By the last part of an option: a function that reads a row or raises, and how a row has to be."""


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"
