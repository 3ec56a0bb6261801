"""The part of a tensor that one process holds, when its rows are divided over processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Hold the numbers `begin` to `begin + len(values)` of a tensor, counted as in `tensor.flatten()`.

    A checkpoint that writes the parts of all processes with their ranges can be read by any number of processes: the
    reader fills its own range from the ranges that overlap with it.

    Attributes:
        values: The numbers that this process holds; empty if the tensor has fewer rows than there are processes. [N]
        shape: The shape of the whole tensor.
        begin: The place of the first number in the whole tensor.
        writes: Whether this process writes the range. If several processes hold the same range, one of them does.
    """

    values: Tensor
    shape: tuple[int, ...]
    begin: int
    writes: bool = True

    @property
    def end(self) -> int:
        """The place after the last number in the whole tensor."""
        return self.begin + self.values.numel()

    def like(self, other: Tensor | Part | Saved) -> Tensor:
        """Return the numbers of another tensor, or of a process's part of it, that are in the places of this part. [N]

        Args:
            other: The tensor. It has the shape of the whole tensor, and a part of it has at least these numbers.
        """
        if isinstance(other, Saved):
            return other.read(self.begin, self.end)
        if isinstance(other, Part):
            return other.values[self.begin - other.begin : self.end - other.begin]
        return other.flatten()[self.begin : self.end]


@dataclass(frozen=True)
class Saved:
    """Hold a divided tensor of a checkpoint, of which each process reads what it needs.

    Attributes:
        shape: The shape of the whole tensor.
        read: Reads the numbers from the first place to before the second one, counted as in `tensor.flatten()`.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


class Unread(nn.Parameter):
    """A weight of which each process will read its own part. Make it with `unread`.

    Until then all its numbers are one zero in memory, so that code which only needs shapes and devices can run.

    Attributes:
        saved: Reads its numbers.
    """

    saved: Saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Unread:
        """Return a copy that reads the same numbers."""
        memo[id(self)] = copied = unread(self.saved, self.dtype, self.requires_grad)
        return copied


def unread(saved: Saved, dtype: torch.dtype, requires_grad: bool = True) -> Unread:
    """Make a weight of zeros that take the memory of one number.

    Args:
        saved: Reads its numbers.
        dtype: The format of its numbers.
        requires_grad: Whether it is trained.
    """
    made = Unread(torch.zeros((), dtype=dtype).expand(saved.shape), requires_grad)
    made.saved = saved
    return made


def row_range(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a process and the row after its last one, as `torch.chunk` divides rows.

    All processes get ceil(rows / ranks) rows, except for the last ones, which get fewer or none.

    Args:
        rows: Number of rows.
        rank: Number of the process, from 0.
        ranks: Number of processes.
    """
    size = math.ceil(rows / ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def flat_range(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of a process in the flattened tensor whose rows are divided over processes."""
    numbers = math.prod(shape[1:])
    first, after = row_range(shape[0], rank, ranks)
    return first * numbers, after * numbers
