"""Bin packing: which items go together into rows of a fixed length."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace


def best_fit(lengths: Iterable[int], room: int) -> array[int]:
    """Put items into rows one by one, each into the row that it fills best, or else into a new one.

    Rows are few if the longest items come first (best-fit decreasing; Johnson 1973, "Near-optimal bin packing
    algorithms"). Of rows with equally much left, the first is taken.

    Args:
        lengths: The length of each item, from 1 to `room`.
        room: The length of a row.

    Returns:
        The number of the row of each item.
    """
    row, rows = array("q"), 0
    left: list[int] = []  # how much some row has left, sorted
    with_left: list[list[int]] = [[] for _ in range(room)]  # by what is left: the rows, the first one on top
    for length in lengths:
        at = bisect_left(left, length)
        if at == len(left):
            free, into, rows = room, rows, rows + 1
        else:
            free = left[at]
            into = heappop(with_left[free])
            if not with_left[free]:
                del left[at]
        row.append(into)
        free -= length
        if not with_left[free]:
            insort(left, free)
        heappush(with_left[free], into)
    return row


def balanced(lengths: Iterable[int], rows: int) -> array[int]:
    """Put items into rows one by one, each into the row that is the shortest so far.

    The longest row is short if the longest items come first (Graham 1969, "Bounds on multiprocessing timing
    anomalies"). Of rows of the same length, the first is taken.

    Args:
        lengths: The length of each item.
        rows: The number of rows.

    Returns:
        The number of the row of each item.
    """
    filled = [(0, number) for number in range(rows)]
    row = array("q")
    for length in lengths:
        tokens, into = filled[0]
        row.append(into)
        heapreplace(filled, (tokens + length, into))
    return row
