"""Elements whose fields are columns are those that tensors of their own would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from trlx_like.data import Experience, RolloutStore, padded
from trlx_like.data.columns import Column, ColumnRows, MadeRows, packed
from trlx_like.data.flat import Flat, FlatRows


@dataclass
class Trace(Experience):
    prompt: Tensor = padded("left", mask="prompt_mask")
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")
    response: Tensor = padded(value=-1)
    mask: Tensor = padded(value=False)
    states: Tensor | None = padded(default=None)  # [B, R, 2]
    grid: Tensor | None = None  # [B, 2, 2]
    rewards: Tensor | None = padded(default=None)


@dataclass
class Ids(Flat):
    FIELDS: ClassVar[Mapping[str, str]] = {"ids": "token", "rewards": "real", "flags": "flag"}
    ids: list[int]
    rewards: list[float]
    flags: list[bool]


ROWS = FlatRows.collect(Ids, [Ids([1, 2, 3, 4], [0.5] * 4, []), Ids([5, 6], [], [True]), Ids([7, 8, 9], [1.0], [])])


def trace(prompt: int, response: int) -> Trace:
    made = [torch.arange(size) + 10 * size for size in (prompt, response)]
    real = [torch.ones(size, dtype=torch.bool) for size in (prompt, response)]
    states, grid = torch.rand(response, 2), torch.rand(2, 2)
    return Trace(made[0], real[0], made[1], real[1], states, grid, torch.rand(response), place=torch.tensor(prompt))


def assert_equal(one: Experience, other: Experience) -> None:
    for field in fields(one):
        got, expected = getattr(one, field.name), getattr(other, field.name)
        assert (got is None) == (expected is None), field.name
        assert got is None or (got.dtype == expected.dtype and torch.equal(got, expected)), field.name


def test_elements_and_batches_are_those_of_a_list() -> None:
    elements = [trace(*sizes) for sizes in ((2, 3), (1, 0), (4, 1), (3, 5))]
    rows = ColumnRows.unpacked(Trace, packed(Trace, elements[:1]), packed(Trace, []), packed(Trace, elements[1:]))
    assert len(rows) == 4 and rows.sizes().tolist() == [5, 1, 5, 8]
    for got, expected in zip(rows, elements, strict=True):
        assert_equal(got, expected)
    order = [3, 0, 0, 1]
    assert_equal(rows.taken(order).batch(), Trace.collate([elements[row] for row in order]))
    some = rows[1:3]
    assert isinstance(some, ColumnRows)
    assert_equal(some.batch(), Trace.collate(elements[1:3]))
    for part in (rows, rows.taken(order)):
        again = ColumnRows.unpacked(Trace, packed(Trace, part))
        assert_equal(again.batch(), part.batch())
        for name, column in packed(Trace, list(part))["columns"].items():  # as a list is saved
            assert {key: value.tolist() for key, value in column.items()} == {
                key: value.tolist() for key, value in part.packed()["columns"][name].items()
            }


def test_parts_of_flat_rows_by_hand() -> None:
    """Prompts of 2, 1 and 2 tokens: the ids are read as int64, the rewards, where a row has some, as float32."""
    ids, size = Column.of(ROWS, "ids"), torch.tensor([2, 1, 2])
    rest = torch.tensor([2, 1, 1])
    columns = {"prompt": ids.part(0, size), "prompt_mask": Column.true(size), "response": ids.part(size, rest)}
    rows = ColumnRows(Trace, {**columns, "mask": Column.true(rest)})
    batch = rows.batch()
    assert batch.prompt.dtype == torch.int64 and batch.prompt.tolist() == [[1, 2], [0, 5], [7, 8]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True], [True, True]]
    assert batch.response.tolist() == [[3, 4], [6, -1], [9, -1]]
    assert rows[-1].response.tolist() == [9] and rows[0].rewards is None
    rewards = Column.of(ROWS, "rewards")
    assert rewards.batch().dtype == torch.float32 and rewards.batch().tolist() == [[0.5] * 4, [0.0] * 4, [1, 0, 0, 0]]
    beside = ids.part(1, rest).beside(ROWS, "ids")
    assert [beside.element(row).tolist() for row in range(3)] == [[2, 3], [6], [8]]
    assert (ids.element(0).dtype, rewards.element(0).dtype) == (torch.int64, torch.float32)
    assert (ids.packed()["values"].dtype, rewards.packed()["values"].dtype) == (torch.int64, torch.float32)
    one = Column.of(FlatRows.collect(Ids, [Ids([7], [], []), Ids([], [], [])]), "ids")
    assert one.batch(value=3).tolist() == [[7], [3]]


def test_what_a_row_has_not_is_that_of_another_column() -> None:
    marked = Column.of(ROWS, "flags").either(Column.true(torch.tensor([2, 4, 1])))
    assert [marked.element(row).tolist() for row in range(3)] == [[True, True], [True], [True]]
    few = FlatRows.collect(Ids, [Ids([1, 2], [], []), Ids([], [], []), Ids([3], [], [])])
    either = Column.of(few, "ids").either(Column.of(ROWS, "ids"))
    assert [either.element(row).tolist() for row in range(3)] == [[1, 2], [5, 6], [3]]


def test_one_element_alone() -> None:
    (row,) = ColumnRows.unpacked(Trace, packed(Trace, [element := trace(2, 3)]))
    assert_equal(row, element)


def test_elements_that_are_made_when_they_are_read() -> None:
    whole = ColumnRows.unpacked(Trace, packed(Trace, [trace(*sizes) for sizes in ((2, 3), (1, 0), (4, 1))]))
    made = MadeRows(whole.taken, torch.from_numpy(whole.sizes()))
    assert len(made) == 3 and made.sizes().tolist() == [5, 1, 5]
    for number in (0, 2, -1):
        assert_equal(made[number], whole[number])
    assert_equal(made.taken([2, 0]).batch(), whole.taken([2, 0]).batch())
    assert packed(Trace, made)["count"] == 3


def test_sizes_leave_out_tokens_that_are_not_padded() -> None:
    ids = Column.of(ROWS, "ids")
    rows = ColumnRows(Trace, {"prompt": Column.single(torch.arange(3)), "response": ids})
    assert rows.sizes().tolist() == [4, 2, 3]


def test_an_element_is_a_copy() -> None:
    rows = ColumnRows.unpacked(Trace, packed(Trace, [trace(1, 2), trace(2, 1)]))
    rows[0].response.fill_(99)
    assert rows[0].response.tolist() == [20, 21]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_store_has_the_same_batches_of_columns(ranks: int) -> None:
    elements = [trace(1 + row % 3, row % 4) for row in range(7)]
    for element in elements:
        element.place = None
    whole = ColumnRows.unpacked(Trace, packed(Trace, elements))
    found = []
    for given in (elements, whole):
        shares = [packed(Trace, given[rank::ranks]) for rank in range(ranks)]
        store = RolloutStore(Trace)
        store.push(given[0::ranks])
        store.join(lambda items, shares=shares: shares, ranks)  # type: ignore[misc]
        found.append(list(store.batches(3, torch.Generator().manual_seed(0))))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)
