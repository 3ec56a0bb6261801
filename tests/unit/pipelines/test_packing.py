"""Packing fills rows and loses nothing: every output is learned once, in a row that has no more tokens than allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trlx_like.data.flat import FlatRows
from trlx_like.pipelines import packing
from trlx_like.pipelines.packing import Packing
from trlx_like.pipelines.tokens import Dialogue

Fill = Callable[[FlatRows[Dialogue], int], Packing]


def of_length(length: int, start: int = 0) -> Dialogue:
    return Dialogue([start + n for n in range(length)], [n > 0 for n in range(length)])


def packed(fill: Fill, dialogues: Sequence[Dialogue], room: int) -> list[list[Dialogue]]:
    """The pieces of each row."""
    made = fill(FlatRows.collect(Dialogue, dialogues), room)
    columns = made.taken(torch.arange(len(made.sizes)))
    rows = []
    for row, size in enumerate(made.sizes.tolist()):
        ids, learned, piece = (columns[name].element(row).tolist() for name in ("ids", "learned", "piece"))
        assert len(ids) == size and piece == sorted(piece)
        places = [[place for place in range(size) if piece[place] == number] for number in range(piece[-1] + 1)]
        rows.append([Dialogue([ids[p] for p in part], [learned[p] for p in part]) for part in places])
    return rows


def fit_best(dialogues: Sequence[Dialogue], room: int) -> list[list[Dialogue]]:
    return packed(packing.fit_best, dialogues, room)


def fill_blocks(dialogues: Sequence[Dialogue], room: int) -> list[list[Dialogue]]:
    return packed(packing.fill_blocks, dialogues, room)


def ids(rows: Sequence[list[Dialogue]]) -> list[list[list[int]]]:
    return [[part.ids for part in row] for row in rows]


def test_bins_golden() -> None:
    # Room for 6. Longest first: 5 opens a row, 4 another; 2 fills the second; 3 opens a third.
    rows = fit_best([of_length(n) for n in (2, 5, 4, 3)], 6)
    assert [[len(part) for part in row] for row in rows] == [[5], [4, 2], [3]]
    assert fit_best([], 6) == []


def test_long_samples_are_split_where_the_last_token_is_seen_again() -> None:
    # 7 tokens and room for 4: 0-3, and 3-6, in which 3 is context. 2 more open a row.
    assert ids(fit_best([of_length(7), of_length(2, 10)], 4)) == [[[0, 1, 2, 3]], [[3, 4, 5, 6]], [[10, 11]]]
    # In order: 0-3; 3-6; and so on. With room for 5: 0-4; 4-6 and the first two of the next, whose rest follows.
    assert ids(fill_blocks([of_length(7), of_length(3, 10)], 5)) == [
        [[0, 1, 2, 3, 4]],
        [[4, 5, 6], [10, 11]],
        [[11, 12]],
    ]
    # One place is left over, where nothing could be learned.
    assert ids(fill_blocks([of_length(4), of_length(3, 10)], 5)) == [[[0, 1, 2, 3]], [[10, 11, 12]]]


def test_what_has_no_output_is_left_out() -> None:
    prompted = Dialogue([0, 1, 2, 3, 4, 5, 6], [False] * 5 + [True] * 2)
    assert ids(fit_best([prompted], 3)) == [[[4, 5, 6]]]
    assert ids(fill_blocks([prompted], 3)) == [[[4, 5, 6]]]
    assert fit_best([prompted, prompted], 4) == [[Dialogue([3, 4, 5, 6], [False, False, True, True])]] * 2


def test_rows_are_read_in_any_order() -> None:
    made = packing.fit_best(FlatRows.collect(Dialogue, [of_length(5), of_length(3, 10), of_length(2, 20)]), 5)
    columns = made.taken(torch.tensor([1, 0, 1]))
    assert columns["ids"].batch().tolist() == [[10, 11, 12, 20, 21], [0, 1, 2, 3, 4], [10, 11, 12, 20, 21]]
    assert columns["piece"].batch().tolist() == [[0, 0, 0, 1, 1], [0] * 5, [0, 0, 0, 1, 1]]
    assert columns["learned"].batch().tolist()[0] == [False, True, True, False, True]


@pytest.mark.parametrize("fill", [packing.fit_best, packing.fill_blocks])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(2, 30), max_size=12), room=st.integers(2, 15))
def test_every_output_is_learned_once(fill: Fill, lengths: list[int], room: int) -> None:
    dialogues = [of_length(length, 100 * number) for number, length in enumerate(lengths)]
    rows = packed(fill, dialogues, room)
    assert all(0 < sum(map(len, row)) <= room for row in rows)
    learned = [
        (part.ids[place - 1], token)  # with the token before it
        for row in rows
        for part in row
        for place, token in enumerate(part.ids)
        if part.is_output[place]
    ]
    assert Counter(learned) == Counter((d.ids[n - 1], d.ids[n]) for d in dialogues for n in range(1, len(d)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 9), max_size=20), st.integers(9, 15))
def test_bins_are_few_and_keep_samples_whole(lengths: list[int], room: int) -> None:
    rows = fit_best([of_length(length, 100 * number) for number, length in enumerate(lengths)], room)
    assert sorted(len(part) for row in rows for part in row) == sorted(lengths)
    # No two rows would fit into one, or one of them would not have been opened.
    sizes = sorted(sum(map(len, row)) for row in rows)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > room
