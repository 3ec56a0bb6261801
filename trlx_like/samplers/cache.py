"""A key-value cache whose rows leave when they are finished and come when there is room, in memory allocated once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

LEAST_KEYS_SAVED = 3000
"""Rows share the keys of a prompt if that saves reading so many of each head: with fewer it is slower."""
LEAST_ROWS = 4
"""Nor is it done if prompts have fewer rows in the mean."""
MOST_PLACES = 2
"""Nor if there are more places for each row, because prompts have different numbers of rows."""


@dataclass
class SharedPrefix:
    """Which rows begin with the same keys and values, because they continue one prompt.

    Each of the G prompts has `rows_per_prompt` places side by side, one for each of its rows. Some stay empty if it has
    fewer.
    """

    width: int
    """How many columns, from the first visible one on, are equal in all rows of a prompt."""
    firsts: slice | Tensor
    """A row of each prompt. [G]"""
    rows_per_prompt: int
    """The rows of the prompt that has the most."""
    places: Tensor | None
    """The place of each row among all; None if row i has place i, and no place is empty. [n]"""


class RowLayer(DynamicLayer):
    """Keys and values of one layer [n, heads, T, width], which are a part of buffers that are allocated once.

    They are the first n rows of the buffers and their columns from `start` to `end`. `DynamicLayer` of transformers
    copies its whole content for every token instead.

    Args:
        rows: The most rows at a time.
        columns: How many tokens a row has room for.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.columns = rows, columns
        self.rows = self.start = self.end = 0
        self.room: list[Tensor] = []
        self.held: list[Tensor] = []  # the first n rows of the buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [n, heads, t, width]; return all of them that are visible."""
        self.append(key_states, value_states)
        return self.show(self.start)

    def append(self, *states: Tensor) -> None:
        """Append states, each [n, heads, t, width]: keys and values, or whatever `admit` was given."""
        count = states[0].shape[2]
        for held, new in zip(self.held, states, strict=True):
            held.narrow(2, self.end, count).copy_(new)
        self.end += count

    def get_seq_length(self) -> int:
        """Return how many columns are visible."""
        return self.end - self.start

    def show(self, start: int) -> tuple[Tensor, Tensor]:
        """Hide the columns before `start`; return the visible keys and values, or the only states twice."""
        self.start = start
        self.keys, self.values = (held.narrow(2, start, self.end - start) for held in (self.held[0], self.held[-1]))
        return self.keys, self.values

    def admit(self, states: Sequence[Tensor], index: Tensor) -> None:
        """Add a row for each entry of `index`: that row of other keys and values, which end at the same column."""
        if not self.room:
            sizes = [(self.most, held.shape[1], self.columns, held.shape[3]) for held in states]
            self.room = [held.new_empty(size) for held, size in zip(states, sizes, strict=True)]
            self.dtype, self.device, self.is_initialized = states[0].dtype, states[0].device, True
        width, before = states[0].shape[2], self.rows
        self.rows, self.end = before + len(index), max(self.end, width)
        for held, new in zip(self.room, states, strict=True):
            # A hidden column is multiplied by 0, which would keep a NaN.
            held[before : self.rows, :, : self.end - width] = 0
            held[before : self.rows, :, self.end - width : self.end] = new[index]
        self.held = [held[: self.rows] for held in self.room]

    def drop(self, holes: Tensor, movers: Tensor, rows: int) -> None:
        """Keep the first `rows` rows, after the rows `movers` behind them have taken the places `holes`."""
        for held in self.room if len(holes) else []:
            held[holes, :, self.start : self.end] = held[movers, :, self.start : self.end]
        self.rows = rows
        self.held = [held[:rows] for held in self.room]

    def shift(self) -> None:
        """Move the visible columns to the beginning of the buffers."""
        for held in self.room:
            held[: self.rows, :, : self.end - self.start] = held[: self.rows, :, self.start : self.end].clone()
        self.start, self.end = 0, self.end - self.start


class RowCache(DynamicCache):
    """Keys and values of rows that end at the same column, each of which begins at a column of its own.

    Args:
        rows: The most rows at a time.
        columns: How many tokens a row has room for, at least as many as any row gets.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.tokens = RowLayer(rows, columns)  # their ids in place of keys, [n, 1, T, 1], and no values
        self.real: Tensor | None = None  # 1 on real tokens and all later ones [n, columns]; None without padding
        self.begins: list[int] = []  # the first column of each row
        self.ends: list[int] = []  # the column behind its prompt
        self.prompts: list[int] = []  # the number of its prompt
        self.admitted = 0  # how many prompts there were
        self.common: SharedPrefix | None = None  # None if rows share too little

    @property
    def ids(self) -> Tensor:
        """The visible token ids. [n, T]"""
        return self.tokens.show(self.tokens.start)[0][:, 0, :, 0]

    def extend(self, ids: Tensor) -> Tensor | None:
        """Append new tokens [n, 1], before the model reads them.

        Returns:
            1 on real tokens [n, T], not to be written to; None if all are real.
        """
        if self.tokens.end == self.tokens.columns:
            self.begins, self.ends = (
                [column - self.tokens.start for column in columns] for columns in (self.begins, self.ends)
            )
            for layer in self._all():
                layer.shift()
            self._show()
        self.tokens.append(ids[:, None, :, None])
        return None if self.real is None else self.real[:, self.tokens.start : self.tokens.end]

    def read(self, count: int) -> None:
        """Count new tokens whose keys and values somebody else has written behind the visible ones."""
        for layer in cast("list[RowLayer]", self.layers):
            layer.end += count

    def admit(self, read: Cache, ids: Tensor, mask: Tensor, index: Tensor) -> None:
        """Add a row for each entry of an index of the rows of another cache, which has read prompts.

        Args:
            read: The other cache.
            ids: What it has read, padded on the left; no longer than the longest row here unless there is none. [U, P]
            mask: True on real tokens. [U, P] bool
            index: A row of `read` for each new row.
        """
        if not self.layers:
            self.layers = [RowLayer(self.tokens.most, self.tokens.columns) for _ in read.layers]
        states: list[Any] = [(layer.keys, layer.values) for layer in cast("list[DynamicLayer]", read.layers)]
        for layer, of_layer in zip(self._all(), [*states, (ids[:, None, :, None],)], strict=True):
            layer.admit(of_layer, index)
        self.begins += [self.tokens.end - length for length in mask.sum(dim=1)[index].tolist()]
        self.ends += [self.tokens.end] * len(index)
        self.prompts += [self.admitted + number for number in index.tolist()]
        self.admitted += len(ids)
        self._show()

    def drop(self, done: list[bool]) -> list[int]:
        """Remove rows, and return the former numbers of the rows that are left, in their new order."""
        left = [row for row, ended in enumerate(done) if not ended]
        holes = [row for row, ended in enumerate(done[: len(left)]) if ended]
        movers = left[len(left) - len(holes) :]
        order = list(range(len(left)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        to, of = (torch.tensor(rows, device=self.tokens.device) for rows in (holes, movers))
        for layer in self._all():
            layer.drop(to, of, len(left))
        self.begins, self.ends, self.prompts = (
            [of_rows[row] for row in order] for of_rows in (self.begins, self.ends, self.prompts)
        )
        self._show()
        return order

    def _all(self) -> Iterator[RowLayer]:
        """Yield the layers, and the tokens, which move together."""
        yield from cast("list[RowLayer]", self.layers)
        yield self.tokens

    def _show(self) -> None:
        for layer in self._all():
            layer.show(min(self.begins, default=layer.end))
        self.real = None
        if max(self.begins, default=0) > self.tokens.start:
            begins = torch.tensor(self.begins, device=self.tokens.device)[:, None]
            self.real = (torch.arange(self.tokens.columns, device=begins.device) >= begins).long()
        self.common = self._common()

    def _common(self) -> SharedPrefix | None:
        """Find what rows share. In the columns before the end of their prompt, those of one prompt are equal."""
        rows: dict[int, list[int]] = {}
        for row, prompt in enumerate(self.prompts):
            rows.setdefault(prompt, []).append(row)
        width = min(self.ends, default=0) - self.tokens.start
        if width * (len(self.prompts) - len(rows)) < LEAST_KEYS_SAVED or len(self.prompts) < LEAST_ROWS * len(rows):
            return None
        most = max(map(len, rows.values()))
        if most * len(rows) > MOST_PLACES * len(self.prompts):
            return None
        places = [0] * len(self.prompts)
        for number, of_prompt in enumerate(rows.values()):
            for place, row in enumerate(of_prompt):
                places[row] = number * most + place
        if places == list(range(len(rows) * most)):
            return SharedPrefix(width, slice(None, None, most), most, None)
        firsts = torch.tensor([of_prompt[0] for of_prompt in rows.values()], device=self.tokens.device)
        return SharedPrefix(width, firsts, most, torch.tensor(places, device=self.tokens.device))
