"""Rows of large data, which stay in memory as JSON text and are decoded when they are read.

Decoded rows take two to four times the memory. Left out on purpose: mapping a file of the user to memory. A file that
somebody writes anew would change the rows of a run, or end it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from trlx_like.reading import read_bytes

FEWEST = 10_000
"""Fewest rows that stay text; fewer are a list."""
PART = 1 << 24
"""Bytes that are searched for the ends of lines at once."""
BOM = b"\xef\xbb\xbf"

_encode = json.JSONEncoder(ensure_ascii=False).encode


class JsonLines(Sequence[Any]):
    """Hold rows as JSON.

    Args:
        data: The text of all rows, as bytes or an array of bytes.
        starts: The byte where each row begins. [N]
        ends: The byte after each row. [N]

    Attributes:
        explain: Raises the error of a row that is no JSON, if it knows the file of the row.
    """

    def __init__(self, data: Any, starts: Any, ends: Any) -> None:
        self._data, self._starts, self._ends = data, np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        self._numbers = np.arange(len(self._starts))
        self._convert: Callable[[Any, int], Any] | None = None
        self._about = ""
        self.explain: Callable[[], object] = lambda: None

    @classmethod
    def read(cls, path: Path) -> JsonLines:
        """Return the lines of a file that are not blank. OSError if it cannot be read."""
        data = read_bytes(path)
        whole = np.frombuffer(data, np.uint8)
        parts = [np.flatnonzero(whole[at : at + PART] == 10) + at for at in range(0, len(whole), PART)]
        ends = np.concatenate([*parts, [len(whole)]]).astype(np.int64)
        starts = np.concatenate([[len(BOM) * data.startswith(BOM)], ends[:-1] + 1])
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        odd = np.flatnonzero(whole[starts] != ord("{"))
        blank = [row for row in odd if not data[starts[row] : ends[row]].decode(errors="replace").strip()]
        return cls(data, np.delete(starts, blank), np.delete(ends, blank))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, rows: Any) -> Any:
        """Return a row, or a list of rows for a slice.

        Raises:
            ValueError: A line is not JSON, or not UTF-8.
        """
        if isinstance(rows, slice):
            return [self[row] for row in range(len(self))[rows]]
        place = range(len(self))[rows]
        try:
            value = json.loads(str(self._data[self._starts[place] : self._ends[place]], "utf-8"))
        except (ValueError, RecursionError):
            self.explain()
            raise
        return value if self._convert is None else self._convert(value, int(self._numbers[place]))

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def taken(self, rows: Sequence[int]) -> JsonLines:
        """Return the rows of these numbers, without a copy of their text."""
        made = copy(self)
        made._starts, made._ends, made._numbers = self._starts[rows], self._ends[rows], self._numbers[rows]
        return made

    def converted(self, convert: Callable[[Any, int], Any], about: str) -> JsonLines:
        """Return rows that are converted when they are read.

        Args:
            convert: Converts a row, given its number among those that were read, after earlier conversions. It may
                raise what is wrong with the row.
            about: What it does, for the digest; "" if it changes nothing.
        """
        made, before = copy(self), self._convert
        made._convert = convert if before is None else lambda value, row: convert(before(value, row), row)
        made._about += about
        return made

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arguments of the constructor as arrays."""
        return {"data": np.frombuffer(self._data, np.uint8), "starts": self._starts, "ends": self._ends}

    def digest(self) -> bytes:
        """Return a digest of all rows."""
        total = hashlib.sha256(self._data)
        for part in (self._starts.tobytes(), self._ends.tobytes(), self._about.encode()):
            total.update(part)
        return total.digest()


def compact(rows: Iterable[Any]) -> list[Any] | JsonLines:
    """Return rows as a list, or as text if they are `FEWEST` or more and JSON can hold them."""
    rows = iter(rows)
    first = list(islice(rows, FEWEST))
    if len(first) < FEWEST:
        return first
    data, ends, every = bytearray(), array("q", [0]), chain(first, rows)
    for row in every:
        try:
            data += _encode(row).encode()
        except (TypeError, ValueError, RecursionError):
            return [*JsonLines(data, ends[:-1], ends[1:]), row, *every]
        ends.append(len(data))
    return JsonLines(data, ends[:-1], ends[1:])


def chosen(rows: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Return the rows of these numbers."""
    return rows.taken(numbers) if isinstance(rows, JsonLines) else [rows[number] for number in numbers]
