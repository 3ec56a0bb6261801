"""Rows of numbers in flat arrays, which take a few bytes a number, and rows that are made when somebody asks for them.

A million samples as lists of Python numbers, or as tensors, take gigabytes. As two arrays for each field of a row they
take little more than their token ids, and can lie in a file that is mapped to memory.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import eq
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np

TYPES: dict[str, tuple[str, Any]] = {
    "token": ("i", np.int32),
    "count": ("q", np.int64),
    "flag": ("b", np.bool_),
    "real": ("d", np.float64),
}
"""By the kind of a field: the code of `array` that collects its numbers, and their type in a flat array."""

T = TypeVar("T")


@dataclass
class Flat:
    """Base of dataclasses that can be taken apart into lists of numbers. A field is a list, a tuple or a number."""

    FIELDS: ClassVar[Mapping[str, str]]
    """The kind of each field, one of `TYPES`."""

    def numbers(self) -> dict[str, Sequence[Any]]:
        """Return the numbers of each field. A field that has its default value is left out."""
        held = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return {n: v if isinstance(v, list | tuple) else (v,) for n, v, default in held if v != default}

    @classmethod
    def of(cls, **numbers: list[Any]) -> Self:
        """Make a row of what `numbers` returned, with an empty list for each field without numbers."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            found, default = numbers[field.name], field.default
            if found or default is MISSING:
                given[field.name] = found if default in (MISSING, None) else type(default)(*found)
        return cls(**given)


R = TypeVar("R", bound=Flat)


class LazyRows(Sequence[T]):
    """A sequence whose rows are made anew each time they are read. It is never changed."""

    @abstractmethod
    def row(self, number: int) -> T:
        """Make a row, given its number from 0."""

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """Count the tokens of each row. [N]"""

    @overload
    def __getitem__(self, rows: int) -> T: ...
    @overload
    def __getitem__(self, rows: slice) -> LazyRows[T]: ...
    def __getitem__(self, rows: int | slice) -> T | LazyRows[T]:
        chosen = range(len(self))[rows]
        return self.row(chosen) if isinstance(chosen, int) else self.taken(chosen)

    def taken(self, rows: Sequence[int]) -> LazyRows[T]:
        """Return the rows of these numbers."""
        return View(self, numbers=rows)

    def __iter__(self) -> Iterator[T]:
        return map(self.row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class FlatRows(LazyRows[R], Generic[R]):
    """Rows of one class, with all numbers of a field in one array and the end of each row in another.

    Args:
        kind: The class of the rows.
        arrays: What `arrays` returned for them.
    """

    def __init__(self, kind: type[R], arrays: Mapping[str, np.ndarray]) -> None:
        self.kind = kind
        self._columns = {name: (arrays[name], arrays[f"{name}.ends"]) for name in kind.FIELDS if name in arrays}
        self._count = int(arrays["rows"][0])

    @classmethod
    def collect(cls, kind: type[R], rows: Iterable[R]) -> FlatRows[R]:
        """Take rows apart, one after the other."""
        values = {name: array(TYPES[of][0]) for name, of in kind.FIELDS.items()}
        ends = {name: array("q") for name in kind.FIELDS}
        for numbers in map(kind.numbers, rows):
            for name, found in values.items():
                found.extend(numbers.get(name, ()))
                ends[name].append(len(found))
        count = max(map(len, ends.values()))
        arrays = {"rows": np.array([count], dtype=np.int64)}
        for name in [name for name in values if values[name]]:
            arrays[name] = np.frombuffer(values[name], dtype=TYPES[kind.FIELDS[name]][1])
            arrays[f"{name}.ends"] = np.frombuffer(ends[name], dtype=np.int64)
        return cls(kind, arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that hold the rows: a file of these is all of them."""
        named = {name: values for name, (values, _) in self._columns.items()}
        ends = {f"{name}.ends": ends for name, (_, ends) in self._columns.items()}
        return {"rows": np.array([self._count], dtype=np.int64), **named, **ends}

    def __len__(self) -> int:
        return self._count

    def row(self, number: int) -> R:
        found: dict[str, list[Any]] = {name: [] for name in self.kind.FIELDS}
        for name, (values, ends) in self._columns.items():
            found[name] = values[ends[number - 1] if number else 0 : ends[number]].tolist()
        return self.kind.of(**found)

    def values(self, name: str) -> np.ndarray:
        """Return all numbers of a field, row after row."""
        return self._columns[name][0] if name in self._columns else np.zeros(0, TYPES[self.kind.FIELDS[name]][1])

    def lengths(self, name: str) -> np.ndarray:
        """Count the numbers of a field in each row. [N]"""
        return np.diff(self._columns[name][1], prepend=0) if name in self._columns else np.zeros(len(self), np.int64)

    def sums(self, name: str) -> np.ndarray:
        """Add up the numbers, or count the flags, of a field in each row. [N] int64, float64 for a field of reals"""
        lengths = self.lengths(name)
        found = np.zeros(len(self), np.float64 if self.kind.FIELDS[name] == "real" else np.int64)
        filled = lengths > 0
        if filled.any():
            starts = (self._columns[name][1] - lengths)[filled]
            found[filled] = np.add.reduceat(self.values(name), starts, dtype=found.dtype)
        return found

    def sizes(self) -> np.ndarray:
        tokens = [self.lengths(name) for name, kind in self.kind.FIELDS.items() if kind == "token"]
        return np.asarray(np.sum(tokens, axis=0))


class View(LazyRows[T]):
    """Rows of another sequence, each converted when it is read.

    Args:
        rows: The other sequence.
        convert: Converts a row; None: rows stay as they are.
        numbers: The numbers of the rows to have, in order; None: all.
    """

    def __init__(
        self, rows: Sequence[Any], convert: Callable[[Any], T] | None = None, numbers: Sequence[int] | None = None
    ) -> None:
        self.rows = rows
        self.convert = convert
        self.numbers = range(len(rows)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> T:
        row: T = self.rows[self.numbers[number]]
        return row if self.convert is None else self.convert(row)

    def sizes(self) -> np.ndarray:
        sizes = self.rows.sizes() if isinstance(self.rows, LazyRows) else np.array([len(row) for row in self.rows])
        return sizes[np.asarray(self.numbers, dtype=np.int64)]
