"""Rows in flat arrays: what goes in comes out, in a few bytes a number, and is made only when it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trlx_like.data.flat import FlatRows, View
from trlx_like.pipelines.preferences import Preference
from trlx_like.pipelines.tokens import Dialogue
from trlx_like.pipelines.truncation import Lost

DIALOGUES = [
    Dialogue([5, 6, 7], [False, True, True]),
    Dialogue([8], [False], [0.1], Lost(2, 0)),
    Dialogue([151_935, 0], [False, True], [0.0, -3.5], Lost(0, 4)),
]
PREFERENCES = [
    Preference([1], [2, 3], [4], margin=0.1),
    Preference([1, 2], [3], [4, 5], [True], [False, True], header=1, lost=Lost(1, 2)),
]


def test_arrays_golden() -> None:
    arrays = FlatRows.collect(Dialogue, DIALOGUES).arrays()
    assert {name: values.tolist() for name, values in arrays.items()} == {
        "rows": [3],
        "ids": [5, 6, 7, 8, 151_935, 0],
        "ids.ends": [3, 4, 6],
        "is_output": [False, True, True, False, False, True],
        "is_output.ends": [3, 4, 6],
        "rewards": [0.1, 0.0, -3.5],
        "rewards.ends": [0, 1, 3],
        "lost": [2, 0, 0, 4],
        "lost.ends": [0, 2, 4],
    }
    assert [arrays[name].dtype for name in ("ids", "is_output", "rewards")] == [np.int32, np.bool_, np.float64]


@pytest.mark.parametrize("rows", [DIALOGUES, PREFERENCES], ids=["dialogues", "preferences"])
def test_rows_come_back(rows: list[Any]) -> None:
    kind = type(rows[0])
    flat: FlatRows[Any] = FlatRows(kind, FlatRows.collect(kind, iter(rows)).arrays())
    assert flat == rows and list(flat) == rows and flat[-1] == rows[-1]
    assert flat != rows[1:] and flat != [rows[0]] * len(rows)
    assert flat[1].lost == rows[1].lost
    if isinstance(flat[1], Preference):
        assert flat[1].header == 1
    with pytest.raises(IndexError):
        flat[len(rows)]


def test_counts_golden() -> None:
    flat = FlatRows.collect(Dialogue, [*DIALOGUES, Dialogue([], []), Dialogue([9], [True])])
    assert flat.lengths("ids").tolist() == flat.sizes().tolist() == [3, 1, 2, 0, 1]
    assert flat.lengths("rewards").tolist() == [0, 1, 2, 0, 0]
    assert flat.sums("is_output").tolist() == [2, 0, 1, 0, 1]
    assert flat.sums("rewards").tolist() == [0, 0.1, -3.5, 0, 0]
    assert flat.values("lost").tolist() == [2, 0, 0, 4]
    plain = FlatRows.collect(Dialogue, DIALOGUES[:1])
    assert plain.values("lost").tolist() == [] and plain.lengths("rewards").tolist() == [0]
    assert FlatRows.collect(Preference, PREFERENCES).sizes().tolist() == [5, 7]  # a prompt and an answer, twice


def test_no_rows() -> None:
    flat = FlatRows.collect(Dialogue, [])
    assert not flat and list(flat) == [] and flat.sums("is_output").tolist() == []


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1)))
def test_a_row_takes_its_ids_and_a_few_bytes(rows: list[list[int]]) -> None:
    flat = FlatRows.collect(Dialogue, (Dialogue(ids, [True] * len(ids)) for ids in rows))
    assert [dialogue.ids for dialogue in flat] == rows
    assert sum(values.nbytes for values in flat.arrays().values()) <= 5 * sum(map(len, rows)) + 16 * len(rows) + 8


def test_a_view_converts_the_rows_that_are_read() -> None:
    read = []

    def tens(number: int) -> int:
        read.append(number)
        return 10 * number

    view = View([1, 2, 3, 4], tens)
    assert (len(view), len(view[1:]), read) == (4, 3, [])
    assert view[-1] == 40 and read == [4]
    assert view[1:][0] == 20 and view[::2] == [10, 30] and view[3:0:-2] == [40, 20]
    assert list(View("abcd", numbers=[2, 0, 0])) == ["c", "a", "a"]


def test_sizes_of_a_view_are_those_of_its_rows() -> None:
    flat = FlatRows.collect(Dialogue, DIALOGUES)
    assert View(flat, numbers=[2, 0]).sizes().tolist() == [2, 3]
    assert flat[1:].sizes().tolist() == View(flat, len)[1:].sizes().tolist() == [1, 2]
    assert View([[1, 2], [3]]).sizes().tolist() == [2, 1]
