"""Packing: several samples in one row of tokens. No token is lost, since a sample that does not fit is split."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from trlx_like.data.flat import View
from trlx_like.pipelines.tokens import Dialogue

Place = tuple[int, int, int]
"""A piece of a sample: the number of the sample, the piece's first token and how many tokens it has."""


def fit_best(dialogues: Sequence[Dialogue], max_length: int) -> View[list[Dialogue]]:
    """Put samples into rows where they fit best, the longest first. A sample is split only if no row could hold it.

    Args:
        dialogues: The samples.
        max_length: The tokens of a row, at least 2.

    Returns:
        The samples, or pieces of samples as `piece` makes them, in each row.
    """
    rows: list[list[Place]] = []
    space: list[tuple[int, int]] = []  # (tokens left, row), sorted
    pieces = [
        (number, start, len(part))
        for number, dialogue in enumerate(dialogues)
        for start in range(0, max(len(dialogue) - 1, 1), max_length - 1)
        if any((part := piece(dialogue, start, max_length)).is_output)
    ]
    for place in sorted(pieces, key=itemgetter(2), reverse=True):
        at = bisect_left(space, (place[2], 0))
        if at == len(space):
            rows.append([])
            left, row = max_length, len(rows) - 1
        else:
            left, row = space.pop(at)
        rows[row].append(place)
        insort(space, (left - place[2], row))
    return _made(dialogues, rows)


def fill_blocks(dialogues: Sequence[Dialogue], max_length: int) -> View[list[Dialogue]]:
    """Put samples into rows in their order, and split those that reach the end of a row.

    Args:
        dialogues: The samples.
        max_length: The tokens of a row, at least 2.

    Returns:
        The samples, or pieces of samples as `piece` makes them, in each row. At most one token of a row is left free,
        except in the last row. Rows that have nothing to learn are left out.
    """
    rows: list[list[Place]] = [[]]
    learned: set[int] = set()  # numbers of the rows that have outputs, from 1
    left = max_length
    for number, dialogue in enumerate(dialogues):
        start = 0
        while start < len(dialogue) - 1:
            if left < 2:  # the first token of a piece is not learned
                rows.append([])
                left = max_length
            part = piece(dialogue, start, left)
            rows[-1].append((number, start, len(part)))
            if any(part.is_output):
                learned.add(len(rows))
            left -= len(part)
            start += len(part) - 1
    return _made(dialogues, [row for number, row in enumerate(rows, start=1) if number in learned])


class _Packed(View[list[Dialogue]]):
    """Rows that are made of their pieces when they are read."""

    def sizes(self) -> np.ndarray:
        return np.array([sum(count for _, _, count in row) for row in self.rows])


def _made(dialogues: Sequence[Dialogue], rows: Sequence[Sequence[Place]]) -> View[list[Dialogue]]:
    return _Packed(rows, lambda row: [piece(dialogues[number], start, count) for number, start, count in row])


def piece(dialogue: Dialogue, start: int, longest: int) -> Dialogue:
    """Return a piece of a sample.

    The first token of a piece is not learned, since nothing precedes it. Therefore the next piece begins with the last
    token of this one, and every output is learned exactly once.

    Args:
        dialogue: The sample.
        start: Its first token in the piece.
        longest: The most tokens of the piece.
    """
    end = start + longest
    return Dialogue(dialogue.ids[start:end], [False, *dialogue.is_output[start + 1 : end]])
