"""Reading the data that a YAML file names: files, Python functions and datasets, as lists of rows.

The kind of a source follows from how it is written, by the first of these that fits:

1. A list holds the rows themselves.
2. A name that ends in .txt, .jsonl, .json, .csv, .tsv or .parquet is a file.
3. `path/to/file.py:function` and `package.module:function` are functions, called without arguments, that return the
   rows. So is `name:function` if a module `name` can be imported.
4. `name`, `owner/name` or a folder, optionally with `:split` (train by default), is loaded by `datasets.load_dataset`.
   The split may be a slice: `imdb:train[:100]`.
5. A mapping has one of these under `path`, and further keys: arguments of `load_dataset` (`name`, `split`, `revision`,
   `data_files`, `data_dir`, `streaming`), `take` (the number of first rows to read) and `columns` (as `data.columns`).
6. A mapping with `mix` has a list of mappings as above, each with a `weight` (1 by default). Their rows are drawn in
   proportion to the weights until one of them is used up.

A row of a table is a dict from column to cell; a row of JSON is the JSON value. If all rows have the same single
column, its cells are the rows. `pipelines/forms.py` lists the columns that are recognised.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trlx_like.config.problems import listed
from trlx_like.errors import ConfigError, DataError, TrlxError
from trlx_like.imports import import_name, is_python_name, raised
from trlx_like.pipelines.files import READERS, described
from trlx_like.pipelines.forms import as_preference, as_prompt, reward_of
from trlx_like.pipelines.lines import FEWEST, JsonLines
from trlx_like.pipelines.prepared import kept_text, sha256_of
from trlx_like.pipelines.returns import finite
from trlx_like.pipelines.rows import is_messages, unusable_text
from trlx_like.pipelines.tables import OPTIONS, datasets_for, load_table, mixed, renamed, without_column
from trlx_like.reading import check_regular, why_unreadable

Kind = Literal["file", "function", "dataset"]

_DATASET = re.compile(r"(?P<name>(?:[A-Za-z]:[\\/])?[^:]+)(?::(?P<split>[^\\/]+))?")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass
class _Rows:
    """Rows, with the place of each for errors."""

    source: str
    values: Sequence[Any]
    read: Callable[[], Iterator[tuple[int | None, Any]]] | None = None  # reads the rows of a file, each with its line

    def place(self, row: int) -> str:
        line = next(islice(self.read(), row, None))[0] if self.read else None
        return f"{self.source}:{line}" if line else f"{self.source}[{row}]"


def load_rows(spec: Any, option: str, columns: Mapping[str, str] | None = None) -> Sequence[Any]:
    """Load the rows of a source; the module's docstring lists the kinds of sources.

    Rows of a large file or data set stay text, and are checked when they are encoded.

    Args:
        spec: The source.
        option: The dotted option, for errors (`data.prompts`). Its last part decides how the rows are checked; rewards
            are converted to numbers, taken from the column "reward" if there are columns.
        columns: `data.columns`, the column of the data by its name here.

    Returns:
        The rows, at least one: a list or `JsonLines`.

    Raises:
        ConfigError: The source cannot be found or read.
        DataError: A row cannot be used. The error names file and line.
    """
    if isinstance(spec, Mapping) and "mix" in spec:
        parts = _mixture(spec, option)
        loaded = [load_rows(part, place, columns) for place, part, _ in parts]
        return mixed(loaded, [weight for _, _, weight in parts], _purpose(option))
    if isinstance(spec, list):
        return _checked(_Rows(option, list(spec)), option, columns, from_python=False)
    path, options, take, own = _parts(spec, option)
    kind = _kind(path, option, options)
    if kind == "dataset":
        rows = _load_dataset(path, options, take, option, spec)
    else:
        rows = {"file": _read_file, "function": _call}[kind](path, option, take)
    return _checked(rows, option, own or columns, from_python=kind == "function")


def check_source(spec: Any, option: str, columns: Mapping[str, str] | None = None) -> tuple[str, Sequence[Any]]:
    """Describe a source in a few words, without calling a function or using the network.

    Returns:
        The words, and the rows of a file or a list, which are checked; no rows of other sources.

    Raises:
        ConfigError: As `load_rows`.
        DataError: As `load_rows`, for files and lists.
    """
    if isinstance(spec, Mapping) and "mix" in spec:
        parts = [check_source(part, place, columns) for place, part, _ in _mixture(spec, option)]
        return ", ".join(words for words, _ in parts), [row for _, rows in parts for row in rows]
    path, options, _, own = ("", {}, None, None) if isinstance(spec, list) else _parts(spec, option)
    kind = "file" if isinstance(spec, list) else _kind(path, option, options)
    if kind == "file":
        rows = load_rows(spec, option, columns)
        deque(rows, maxlen=0)  # those that stay text are checked when they are read
        return f"{len(rows)} row{'s' * (len(rows) != 1)}{f' of {path}' * bool(path)}", rows
    if kind == "function":
        load_function(path, option)
        return f"what {path} returns", []
    datasets_for(option)
    match = _DATASET.fullmatch(path)
    if match and Path(os.path.expanduser(match["name"])).is_dir():  # its first row is read, and nothing is written
        split = str(options.get("split", match["split"] or "train")).partition("[")[0]
        first = _load_dataset(match["name"], {**options, "split": split, "streaming": True}, 1, option, spec)
        _checked(first, option, own or columns, from_python=False)
    return f"dataset {path}", []


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


def _parts(spec: Any, option: str) -> tuple[str, dict[str, Any], int | None, Mapping[str, str] | None]:
    """Return the path of a source, its arguments of `load_dataset`, its number of rows, and its columns."""
    given = dict(spec) if isinstance(spec, Mapping) else {"path": spec}
    path, take, columns, _ = (given.pop(key, None) for key in ("path", "take", "columns", "weight"))
    if not isinstance(path, str) or given.keys() - set(OPTIONS):
        raise ConfigError(
            f"{option} must have a path, and may have {listed([*OPTIONS, 'take', 'columns', 'weight'])}, not be "
            f"{described(spec)}."
        )
    if take is not None and (not isinstance(take, int) or isinstance(take, bool) or take < 1):
        raise ConfigError(f"{option}.take ({take!r}) must be a number of rows, at least 1.")
    if columns is not None and not is_columns(columns):
        raise ConfigError(f"{option}.columns ({columns!r}) must map names to the columns of the data.")
    return path, given, take, columns


def _mixture(spec: Mapping[str, Any], option: str) -> list[tuple[str, Any, float]]:
    """Return the option, the source and the weight of each part of a mixture."""
    parts = spec["mix"]
    if len(spec) > 1 or not isinstance(parts, list) or not parts:
        raise ConfigError(f"{option}.mix must be a list of sources, and have no keys beside it.")
    found = [(part.get("weight", 1.0) if isinstance(part, Mapping) else 1.0, part) for part in parts]
    for place, (weight, _) in enumerate(found):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(f"{option}.mix[{place}].weight ({weight!r}) must be a number above 0.")
    return [(option, part, float(weight)) for weight, part in found]


def is_columns(columns: Any) -> bool:
    """Tell whether a value maps names to columns."""
    return isinstance(columns, Mapping) and all(isinstance(text, str) for pair in columns.items() for text in pair)


def _kind(spec: str, option: str, options: Mapping[str, Any] = MappingProxyType({})) -> Kind:
    if options:
        return "dataset"
    path = Path(os.path.expanduser(spec))
    if path.suffix.lower() in READERS:
        return "file"
    if path.is_file():
        raise ConfigError(f"{option} ({spec!r}): a file of data must end in {listed([*READERS])}.")
    if is_python_name(spec) and _is_python(spec.rpartition(":")[0]):
        return "function"
    match = _DATASET.fullmatch(spec)
    if match and (_HUB_NAME.fullmatch(match["name"]) or Path(os.path.expanduser(match["name"])).is_dir()):
        return "dataset"
    raise ConfigError(
        f"{option} ({spec!r}) must be a file ({listed([*READERS])}), module:function, path/to/file.py:function, or the "
        "name of a dataset or its folder, with :split after it."
    )


def _is_python(place: str) -> bool:
    """Tell whether the part before the colon is a .py file or a module, and not the name of a dataset."""
    if place.endswith(".py") or "." in place or place in sys.modules:
        return True
    found = PathFinder.find_spec(place, [str(Path.cwd()), *sys.path])
    return found is not None and found.loader is not None  # without a loader it is just a folder


def _read_file(spec: str, option: str, take: int | None) -> _Rows:
    path = Path(os.path.expanduser(spec))

    def read() -> Iterator[tuple[int | None, Any]]:
        with _readable(spec, option):
            yield from islice(READERS[path.suffix.lower()](path, option), take)

    values = (value for _, value in read())
    found: Sequence[Any] = []
    if _purpose(option) not in _ROWS:
        return _Rows(spec, list(values), read)
    with _readable(spec, option):
        check_regular(path)
        if path.suffix.lower() == ".jsonl" and take is None:
            found = JsonLines.read(path)
        if len(found) < FEWEST:
            found = kept_text(values, path.suffix.lower(), take, sha256_of(path))
    if isinstance(found, JsonLines):
        found.explain = lambda: deque(read(), maxlen=0)
    return _Rows(spec, found, read)


@contextmanager
def _readable(spec: str, option: str) -> Iterator[None]:
    """Turn the failure to read a file into an error that names the option."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        kind = ConfigError if isinstance(error, OSError) else DataError
        raise kind(f"{option} ({spec!r}): {why_unreadable(error)}.") from error


# Functions and datasets.


def _call(spec: str, option: str, take: int | None) -> _Rows:
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
    return _Rows(f"{spec}()", values[:take])


def _load_dataset(path: str, options: Mapping[str, Any], take: int | None, option: str, spec: Any) -> _Rows:
    match = None if "split" in options else _DATASET.fullmatch(path)
    if match and match["split"]:
        path, options = match["name"], {"split": match["split"], **options}
    return _Rows(str(spec if isinstance(spec, str) else path), load_table(path, options, take, option, spec))


# Rows.


def _checked(rows: _Rows, option: str, columns: Mapping[str, str] | None, *, from_python: bool) -> Sequence[Any]:
    """Return the rows if they can be used. Rows of a function are left to the pipeline, which may be the user's own."""
    rows.values = renamed(rows.values, columns, f"{option}: {rows.source}")
    if not from_python:
        rows.values = without_column(rows.values, ("prompt", "text")[_purpose(option) != "prompts" :])
    if not rows.values:
        raise DataError(f"{option}: {rows.source} has no rows.")
    purpose = _purpose(option)
    if purpose not in _FORMS or (from_python and purpose != "rewards"):
        return rows.values
    if isinstance(rows.values, JsonLines) and purpose in _ROWS:
        return rows.values.converted(lambda value, number: _usable(value, option, partial(rows.place, number)), "")
    return [_usable(value, option, partial(rows.place, number)) for number, value in enumerate(rows.values)]


def _purpose(option: str) -> str:
    return option.rpartition(".")[2].removeprefix("eval_")


def _usable(value: Any, option: str, place: Callable[[], str]) -> Any:
    """Return a row as it is used, or raise DataError that names its place."""
    read, wanted = _FORMS[_purpose(option)]
    try:
        if why := unusable_text(value):
            raise DataError(f"{option}: {place()}: {why}.")
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{option}: {place()} must be {wanted}, not {described(value)}.") from None


def _accept(value: Any, usable: bool) -> Any:
    if not usable:
        raise ValueError
    return value


def _prompt(value: Any) -> Any:
    row = as_prompt(value)
    prompt = row.get("prompt") if isinstance(row, Mapping) else row
    return _accept(value, isinstance(prompt, str) or is_messages(prompt))


def _sample(value: Any) -> Any:
    return _accept(value, isinstance(value, (str, list, dict)))


def _preference(value: Any) -> Any:
    whole = isinstance(value, list) and len(value) == 3
    row = as_preference(value)
    pair = isinstance(row, Mapping) and ({"chosen", "rejected"} <= row.keys() or reward_of(row) is not None)
    return _accept(value, whole or pair)


def _reward(value: Any) -> float | list[float]:
    reward: Any = reward_of(value) if isinstance(value, dict) else value
    return [finite(number) for number in reward] if isinstance(reward, list) else finite(reward)


_ROWS = ("prompts", "samples", "preferences")
"""Last parts of options whose rows are used as they are read."""

_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "prompts": (_prompt, 'text or messages, or have either under "prompt"'),
    "samples": (_sample, "text, a list of texts, or an object"),
    "rewards": (_reward, 'a finite number, or have one under "reward"'),
    "preferences": (_preference, "an object with chosen and rejected, or a list of prompt, chosen and rejected"),
}
"""By the last part of an option: a function that reads a row or raises, and how a row has to be."""
