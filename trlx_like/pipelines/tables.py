"""Tables as lists of rows: data sets read by `datasets`, its objects, frames of pandas, and mixtures of sources.

A list of rows is returned as it is. `pipelines/sources.py` decides what a source is.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError, DataError
from trlx_like.imports import needed
from trlx_like.pipelines.files import described
from trlx_like.pipelines.lines import JsonLines, chosen, compact
from trlx_like.pipelines.prepared import CHUNK, kept_text

OPTIONS = ("name", "split", "revision", "data_files", "data_dir", "streaming")
"""Keys of a source that are arguments of `datasets.load_dataset`."""

HELD_OUT = ("validation", "valid", "eval", "dev", "test")
"""Splits that become evaluation data, by rank."""


def listed(data: Any, name: str) -> Any:
    """Return data as a list of rows.

    Args:
        data: A list, a `Dataset` or `IterableDataset`, a frame of pandas, a generator, or another iterable. Text,
            mappings, functions and None are returned as they are.
        name: The name of the data in errors.

    Raises:
        DataError: A frame has two columns of the same name.
    """
    if data is None or isinstance(data, str | bytes | Mapping | list) or callable(data):
        return data
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        if len(set(data.columns)) < len(data.columns):
            raise DataError(f"{name}: a frame must name every column once, not {', '.join(map(repr, data.columns))}.")
        return [{column: _cell(value) for column, value in row.items()} for row in data.to_dict("records")]
    if hasattr(data, "features"):
        return _rows(data)
    if hasattr(data, "tolist"):  # an array, or a column of pandas
        return _cell(data)
    return list(data) if isinstance(data, Iterable) else data


def divided(data: Any) -> tuple[Any, Any]:
    """Return the training rows and the evaluation rows of a `DatasetDict`; of other data, the data and None."""
    if not isinstance(data, Mapping) or "train" not in data or not hasattr(data["train"], "features"):
        return data, None
    return data["train"], next((data[split] for split in HELD_OUT if split in data), None)


def renamed(rows: Sequence[Any], columns: Mapping[str, str] | None, name: str) -> Sequence[Any]:
    """Rename the columns of rows.

    Args:
        rows: The rows. Only mappings have columns; others are returned as they are.
        columns: `data.columns`, the column of the data by its name here.
        name: The name of the data in errors.

    Raises:
        DataError: A row lacks one of the columns. Rows that stay text raise it when they are read.
    """
    if not columns:
        return rows
    if isinstance(rows, JsonLines):
        names = dict(columns)
        return rows.converted(lambda row, number: _renamed(row, names, f"{name}[{number}]"), repr(names))
    return [_renamed(row, columns, f"{name}[{number}]") for number, row in enumerate(rows)]


def _renamed(row: Any, columns: Mapping[str, str], place: str) -> Any:
    if not isinstance(row, Mapping):
        return row
    for wanted, column in columns.items():
        if column not in row:
            names = described(dict(row)).removeprefix("an object with ")
            raise DataError(f"{place}: data.columns.{wanted} ({column!r}) is no column; there are {names}.")
    taken = {*columns, *columns.values()}
    return {
        **{name: row[column] for name, column in columns.items()},
        **{k: v for k, v in row.items() if k not in taken},
    }


def without_column(rows: Sequence[Any], same: Sequence[str] = ()) -> Sequence[Any]:
    """Return the cells of the only column if all rows are dicts with the same single key, else the rows.

    A column of conversations keeps its name, by which its form is recognised.

    Args:
        rows: The rows.
        same: Columns of which a cell means the same as a row that has no other. If the first of many rows has one of
            them alone, the others are not read to see whether they do.
    """
    columns = next((tuple(row) for row in rows if isinstance(row, dict)), ())

    def only(row: Any) -> bool:
        return isinstance(row, dict) and tuple(row) == columns

    if len(columns) != 1 or columns[0] in ("messages", "conversations", "conversation"):
        return rows
    if not (isinstance(rows, JsonLines) and columns[0] in same) and not all(map(only, rows)):
        return rows
    if isinstance(rows, JsonLines):
        return rows.converted(lambda row, _: row[columns[0]] if only(row) else row, columns[0])
    return [row[columns[0]] for row in rows]


def _rows(table: Any, take: int | None = None) -> list[Any] | JsonLines:
    """Return the first `take` rows of a `Dataset`, which is quick in batches, or of an `IterableDataset`."""
    rows = iter(table)
    if hasattr(table, "num_rows"):
        parts = table.iter(CHUNK)
        rows = (dict(zip(part, cells, strict=True)) for part in parts for cells in zip(*part.values(), strict=True))
    return compact(islice(rows, take))


def load_table(path: str, options: Mapping[str, Any], take: int | None, option: str, spec: Any) -> Sequence[Any]:
    """Read the rows of a data set.

    Args:
        path: The name of the data set, a folder, or a format such as csv with `data_files`.
        options: Some of `OPTIONS`.
        take: The number of rows to read; None: all.
        option: The dotted option, for errors.
        spec: The source as it was given, for errors.

    Raises:
        ConfigError: `datasets` is not installed, or cannot load it.
    """
    datasets = datasets_for(option)
    folder = Path(os.path.expanduser(path))
    try:
        table = datasets.load_dataset(str(folder) if folder.is_dir() else path, **{"split": "train", **options})
        return _rows(table, take)
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        here = folder.is_dir() or "data_files" in options
        found = "" if here else f" There is no file, folder or module {path} here, and as a dataset of the hub:"
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        empty = folder.is_dir() and isinstance(error, FileNotFoundError)
        right = " A folder of data has files such as train.jsonl or train.parquet." * empty
        raise ConfigError(f"{option} ({spec!r}) cannot be loaded.{found} {why.rstrip('.')}.{right}") from error


def datasets_for(option: str) -> Any:
    """Import `datasets`, or raise the error that names the extra to install."""
    with needed(f"{option}: a dataset needs packages that are not installed", "datasets"):
        import datasets
    return datasets


def mixed(parts: Sequence[Sequence[Any]], weights: Sequence[float], use: str) -> Sequence[Any]:
    """Draw rows of several sources in proportion to weights, each row once at most, until one source is used up.

    Args:
        parts: The rows of each source.
        weights: The weight of each source.
        use: What the rows are checked as when they are read.
    """
    if not any(isinstance(part, JsonLines) for part in parts):
        return list(_drawn(parts, weights))
    about = [part.digest().hex() if isinstance(part, JsonLines) else part for part in parts]
    return kept_text(_drawn(parts, weights), use, weights, about)


def _drawn(parts: Sequence[Sequence[Any]], weights: Sequence[float]) -> Iterator[Any]:
    """Iterate over the rows of a mixture."""
    scale = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
    draw = random.Random(0)  # the same rows for every seed of a run
    for part, weight in zip(parts, weights, strict=True):
        count = min(len(part), max(1, round(scale * weight)))
        yield from (part[row] for row in sorted(draw.sample(range(len(part)), count)))


def held_out(rows: Sequence[Any], share: float) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split rows into those to train on and those to evaluate on, the same ones for every seed of a run.

    Args:
        rows: The rows, at least two.
        share: The fraction to evaluate on; at least one row.
    """
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    drawn = set(random.Random(0).sample(range(len(rows)), count))
    return chosen(rows, [n for n in range(len(rows)) if n not in drawn]), chosen(rows, sorted(drawn))


def _cell(value: Any) -> Any:
    """Return a cell, column or array as Python values: None for what is missing, lists for arrays at any depth."""
    if hasattr(value, "tolist"):
        return _cell(value.tolist())
    if isinstance(value, list):
        return [_cell(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _cell(entry) for name, entry in value.items()}
    missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    return None if missing else value
