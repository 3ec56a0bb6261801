"""Experience in flat tensors: an element is cut out when it is read, and a batch is gathered at once.

A million elements as tensors of their own take gigabytes. Here each field is one tensor with the numbers of all
elements, which may be mapped from a file, and two with their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trlx_like.data.experience import IDS, Experience
from trlx_like.data.flat import FlatRows, LazyRows

E = TypeVar("E", bound=Experience)

READ_AS = {torch.int32: torch.int64, torch.float64: torch.float32}
"""The types in which the numbers of flat rows are read."""


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return `lengths[n]` whole numbers from `starts[n]` on for each n, one range after the other. [sum of lengths]"""
    before = starts - (lengths.cumsum(0) - lengths)
    return before.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


@dataclass(frozen=True)
class Column:
    """Hold one field of all elements.

    Attributes:
        values: The numbers, of which elements may share some. [M, *]
        starts: The place in `values` where each element begins. [N] int64
        lengths: How many numbers each element has; None for a field without padding, of which it has one. [N] int64
        dtype: The type that elements and batches have; None: that of `values`.
        saved: Whether checkpoints and other processes get it; False for what they compute again.
    """

    values: Tensor
    starts: Tensor
    lengths: Tensor | None
    dtype: torch.dtype | None = None
    saved: bool = True

    @classmethod
    def of(cls, rows: FlatRows[Any], name: str) -> Column:
        """Return a field of flat rows, without a copy of its numbers."""
        lengths, values = torch.from_numpy(rows.lengths(name)), torch.from_numpy(rows.values(name))
        return cls(values, lengths.cumsum(0) - lengths, lengths, READ_AS.get(values.dtype))

    @classmethod
    def true(cls, lengths: Tensor) -> Column:
        """Return a mask that is True everywhere, given its length in each element. [N]"""
        return cls(torch.ones(int(lengths.max()), dtype=torch.bool), torch.zeros_like(lengths), lengths)

    @classmethod
    def single(cls, values: Tensor) -> Column:
        """Return a field without padding, given the value of each element. [N, *]"""
        return cls(values, torch.arange(len(values)), None)

    def part(self, first: Tensor | int, lengths: Tensor) -> Column:
        """Return `lengths` numbers of each element, from its number `first` on. Both are [N] int64."""
        return replace(self, starts=self.starts + first, lengths=lengths)

    def beside(self, rows: FlatRows[Any], name: str) -> Column:
        """Return another field of the flat rows that this column is a part of, at the same places."""
        return replace(Column.of(rows, name), starts=self.starts, lengths=self.lengths)

    def either(self, other: Column) -> Column:
        """Return this column, and the elements of another in place of empty ones."""
        if not len(self.values):
            return other
        assert self.lengths is not None and other.lengths is not None
        has = self.lengths > 0
        starts = self.starts.where(has, len(self.values) + other.starts)
        return Column(torch.cat([self.values, other.values]), starts, self.lengths.where(has, other.lengths))

    def taken(self, rows: Tensor) -> Column:
        """Return the elements of these numbers. [n] int64"""
        lengths = None if self.lengths is None else self.lengths[rows]
        return replace(self, starts=self.starts[rows], lengths=lengths)

    def element(self, row: int) -> Tensor:
        """Return a copy of the numbers of one element."""
        start = int(self.starts[row])
        found = self.values[start] if self.lengths is None else self.values[start : start + int(self.lengths[row])]
        return found.to(self.dtype or found.dtype, copy=True)

    def batch(self, side: str = "right", value: float = 0) -> Tensor:
        """Return all elements, padded with a value on a side. [N, T, *]"""
        if self.lengths is None:
            return self.values[self.starts]
        places = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        found = [self.values.narrow(0, start, length) for start, length in places]
        return pad_sequence(found, True, value, side).to(self.dtype or self.values.dtype)

    def packed(self) -> dict[str, Tensor]:
        """Return the numbers of one element after the other, and the shape of each, for a checkpoint."""
        if self.lengths is None:
            values, shapes = self.values[self.starts], torch.zeros(len(self.starts), 0, dtype=torch.int64)
        else:
            values, shapes = self.values[ranges(self.starts, self.lengths)], self.lengths[:, None]
        rest = torch.tensor(values.shape[1:], dtype=torch.int64).expand(len(shapes), -1)
        return {
            "values": values.to(self.dtype or self.values.dtype).reshape(-1),
            "shapes": torch.cat([shapes, rest], dim=1),
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, Tensor], padded: bool) -> Column:
        """Return what `packed` described. In a field that is `padded`, elements differ in their first dimension."""
        shapes = packed["shapes"]
        if not padded:
            return cls.single(packed["values"].view(len(shapes), *shapes[0].tolist()))
        lengths = shapes[:, 0].contiguous()
        return cls(packed["values"].view(-1, *shapes[0, 1:].tolist()), lengths.cumsum(0) - lengths, lengths)


class ColumnRows(LazyRows[E], Generic[E]):
    """Elements whose fields are columns.

    Args:
        kind: Their class.
        columns: Each field by its name. A field that is left out is None in all elements.
    """

    def __init__(self, kind: type[E], columns: Mapping[str, Column]) -> None:
        self.kind, self.columns = kind, dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).starts)

    def row(self, number: int) -> E:
        return self._made({name: column.element(number) for name, column in self.columns.items()})

    def taken(self, rows: Sequence[int] | Tensor | np.ndarray) -> ColumnRows[E]:
        """Return the elements of these numbers, without a copy of what they hold."""
        numbers = torch.as_tensor(rows)
        return ColumnRows(self.kind, {name: column.taken(numbers) for name, column in self.columns.items()})

    def batch(self) -> E:
        """Return all elements as one batch, as `Experience.collate` does."""
        about = {field.name: field.metadata for field in fields(self.kind)}
        padding = {name: (about[name].get("side", "right"), about[name].get("value", 0)) for name in self.columns}
        return self._made({name: column.batch(*padding[name]) for name, column in self.columns.items()})

    def _made(self, values: Mapping[str, Tensor]) -> E:
        return self.kind(**{field.name: values.get(field.name) for field in fields(self.kind)})

    def sizes(self) -> np.ndarray:
        lengths = [column.lengths for name, column in self.columns.items() if name in IDS]
        return torch.stack([each for each in lengths if each is not None]).sum(dim=0).numpy()

    def packed(self) -> dict[str, Any]:
        """Return all elements as their number and the packed columns, for a checkpoint or another process."""
        held = [field.name for field in fields(self.kind) if field.name in self.columns]
        names = [name for name in held if self.columns[name].saved]
        return {"count": len(self), "columns": {name: self.columns[name].packed() for name in names}}

    @classmethod
    def unpacked(cls, kind: type[E], *parts: Mapping[str, Any]) -> ColumnRows[E]:
        """Return the elements of one or more `packed`, one part after the other. At least one part has elements."""
        filled = [part["columns"] for part in parts if part["count"]]
        about = {field.name: field.metadata for field in fields(kind)}
        columns = {}
        for name in filled[0]:
            whole = {key: torch.cat([part[name][key] for part in filled]) for key in ("values", "shapes")}
            columns[name] = Column.unpacked(whole, padded="side" in about[name])
        return cls(kind, columns)


class MadeRows(LazyRows[E]):
    """Elements whose fields are gathered from elsewhere, for as many elements at once as somebody reads.

    Args:
        make: Returns the elements of these numbers. [n] int64
        sizes: The tokens of each element. [N] int64
    """

    def __init__(self, make: Callable[[Tensor], ColumnRows[E]], sizes: Tensor) -> None:
        self.make, self._sizes = make, sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def row(self, number: int) -> E:
        return self.taken([number]).row(0)

    def taken(self, rows: Sequence[int] | Tensor) -> ColumnRows[E]:
        return self.make(torch.as_tensor(rows, dtype=torch.int64))

    def sizes(self) -> np.ndarray:
        return self._sizes.numpy()


def as_columns(kind: type[E], elements: Sequence[E]) -> ColumnRows[E]:
    """Return elements with one tensor for each field. There has to be one at least."""
    if isinstance(elements, ColumnRows):
        return elements
    if isinstance(elements, MadeRows):
        return elements.taken(torch.arange(len(elements)))
    return ColumnRows.unpacked(kind, packed(kind, elements))


def packed(kind: type[Experience], elements: Sequence[Experience]) -> dict[str, Any]:
    """Return elements as their number and flat columns: all numbers of a field, and the shapes of the elements."""
    if isinstance(elements, ColumnRows | MadeRows):
        return elements.taken(torch.arange(len(elements))).packed()
    columns: dict[str, Any] = {}
    for column in fields(kind) if elements else ():
        values = [getattr(element, column.name) for element in elements]
        if values[0] is not None:
            flat = torch.cat([value.reshape(-1) for value in values])
            shapes = torch.tensor([list(value.shape) for value in values], dtype=torch.int64)
            columns[column.name] = {"values": flat, "shapes": shapes}
    return {"count": len(elements), "columns": columns}


def batch_of(kind: type[E], elements: Sequence[E], rows: Sequence[int]) -> E:
    """Return the elements of these numbers as one batch."""
    if isinstance(elements, ColumnRows | MadeRows):
        batch: E = elements.taken(rows).batch()
        return batch
    return kind.collate([elements[row] for row in rows])
