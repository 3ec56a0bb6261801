"""Rows of a large file of JSON lines, which stay in memory as they are written and are decoded when they are read.

Decoded rows take three times the memory, and seconds for each hundred thousand at every start. Left out on purpose:
mapping the file to memory. A file that somebody writes anew would change the rows of a run, or end it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trlx_like.reading import read_bytes

PART = 1 << 24
"""Bytes that are searched for the ends of lines at once."""
BOM = b"\xef\xbb\xbf"


class JsonLines(Sequence[Any]):
    """Hold the lines of a file, of which each that is not blank is a row.

    Args:
        path: The file.

    Attributes:
        check: Reads all rows and raises what is wrong with one, for the first use of them. Rows that were encoded
            before are known to be right.

    Raises:
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._data = read_bytes(path)
        self.check: Callable[[], None] = lambda: None
        whole = np.frombuffer(self._data, np.uint8)
        parts = [np.flatnonzero(whole[at : at + PART] == 10) + at for at in range(0, len(whole), PART)]
        ends = np.concatenate([*parts, [len(whole)]]).astype(np.int64)
        starts = np.concatenate([[len(BOM) * self._data.startswith(BOM)], ends[:-1] + 1])
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        odd = np.flatnonzero(whole[starts] != ord("{"))
        blank = [row for row in odd if not self._data[starts[row] : ends[row]].decode(errors="replace").strip()]
        self._starts, self._ends = np.delete(starts, blank), np.delete(ends, blank)

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
        return json.loads(self._data[self._starts[place] : self._ends[place]].decode())

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def line(self, row: int) -> int:
        """Return the number of the line of a row, from 1."""
        return self._data.count(b"\n", 0, self._starts[row]) + 1

    def byte(self, row: int) -> int:
        """Return the place in the file where a row begins."""
        return int(self._starts[row])

    def digest(self) -> bytes:
        """Return a digest of the whole file."""
        return hashlib.sha256(self._data).digest()
