"""Elements to batches and back: nothing but padding is added, and nothing but padding is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from trlx_like.data import Completion, Experience, padded
from trlx_like.data.experience import padded_rows

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass
class Trace(Experience):
    """All kinds of fields at once."""

    prompt: Tensor = padded("left", 9, mask="prompt_mask")
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")
    logprobs: Tensor = padded()
    mask: Tensor = padded(value=False)
    latents: Tensor = padded(value=-1)  # [T, 2]
    score: Tensor = torch.tensor(0.0)  # []
    segment: Tensor | None = padded(value=-1, default=None)
    goal: Tensor | None = None  # [3]


def trace(prompt: int, length: int, start: float = 0.0, optional: bool = False) -> Trace:
    numbers = torch.arange(length).float() + start
    return Trace(
        torch.arange(prompt) + 1,
        torch.ones(prompt).bool(),
        numbers,
        torch.ones(length).bool(),
        torch.stack([numbers, -numbers], dim=1),
        torch.tensor(start),
        torch.arange(length) if optional else None,
        torch.full((3,), start) if optional else None,
    )


def same(one: Experience, other: Experience) -> bool:
    """Equal bit by bit (NaN included), types and absent fields too."""
    for column in fields(one):
        a, b = getattr(one, column.name), getattr(other, column.name)
        if (a is None) != (b is None):
            return False
        if a is not None and (
            a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if a.dim()
            else a.item() != b.item()
        ):
            return False
    return True


def test_collate_golden() -> None:
    batch = Trace.collate([trace(3, 1, 0.5), trace(1, 2, 4.0)])
    assert batch.prompt.tolist() == [[1, 2, 3], [9, 9, 1]]
    assert batch.prompt_mask.tolist() == [[True, True, True], [False, False, True]]
    assert batch.logprobs.tolist() == [[0.5, 0.0], [4.0, 5.0]]
    assert batch.mask.tolist() == [[True, False], [True, True]]
    assert batch.latents.tolist() == [[[0.5, -0.5], [-1, -1]], [[4.0, -4.0], [5.0, -5.0]]]
    assert batch.score.tolist() == [0.5, 4.0]
    assert batch.segment is None and batch.goal is None
    assert batch.prompt.dtype == torch.int64 and batch.mask.dtype == torch.bool


def test_collate_golden_of_optional_fields() -> None:
    batch = Trace.collate([trace(1, 1, 1.0, optional=True), trace(1, 2, 2.0, optional=True)])
    assert batch.segment is not None and batch.segment.tolist() == [[0, -1], [0, 1]]
    assert batch.goal is not None and batch.goal.tolist() == [[1.0] * 3, [2.0] * 3]


def test_split_golden() -> None:
    nan = math.nan
    batch = Completion(
        torch.tensor([[7, 7, 5], [1, 2, 3]]),
        torch.tensor([[False, False, True], [True, True, True]]),
        torch.tensor([[4, 6], [8, 7]]),
        torch.tensor([[True, True], [True, False]]),
    )
    first, second = batch.split()
    assert [t.tolist() for t in (first.prompt, first.response, second.prompt, second.response)] == [
        *([5], [4, 6]),
        *([1, 2, 3], [8]),
    ]
    row = Trace.collate([trace(2, 1), trace(1, 3)])
    row.logprobs[0, 1:], row.latents[0, 1:], row.prompt[1, 0] = nan, nan, 77
    assert all(same(got, put) for got, put in zip(row.split(), [trace(2, 1), trace(1, 3)], strict=True))


def test_lengths_and_rows_golden() -> None:
    batch = Trace.collate([trace(3, 1), trace(1, 2), trace(2, 4)])
    assert batch.lengths().tolist() == [4, 3, 6] and len(batch) == 3
    assert batch[1:].score.shape == (2,)
    for rows in ([2, 0], torch.tensor([2, 0])):
        chosen = batch[rows]
        assert chosen.prompt.tolist() == [[9, 1, 2], [1, 2, 3]] and chosen.goal is None
        assert chosen.mask.sum(dim=1).tolist() == [4, 1]


def test_trim_golden() -> None:
    batch = Trace.collate([trace(3, 1), trace(1, 2), trace(2, 4)])[:2].trim()
    assert batch.prompt.tolist() == [[1, 2, 3], [9, 9, 1]] and batch.mask.tolist() == [[True, False], [True, True]]
    assert batch.latents.shape == (2, 2, 2) and batch.score.shape == (2,)
    only = Trace.collate([trace(3, 4, optional=True), trace(1, 2, optional=True)])[1:].trim()
    assert only.prompt.tolist() == [[1]] and only.segment is not None and only.segment.tolist() == [[0, 1]]


def test_elements_own_their_memory() -> None:
    batch = Trace.collate([trace(2, 2), trace(1, 1)])
    row = batch.split()[0]
    batch.logprobs.fill_(5)
    assert row.logprobs.tolist() == [0.0, 1.0]
    assert row.logprobs.untyped_storage().nbytes() == 8, "an element would keep its whole batch alive"


def test_to_moves_what_there_is() -> None:
    moved = trace(1, 2, optional=True).to("meta")
    assert all(value.device.type == "meta" for value in vars(moved).values() if value is not None)
    assert trace(1, 2).to("meta").goal is None


@st.composite
def elements(draw: st.DrawFn) -> list[Trace]:
    optional = draw(st.booleans())
    number = st.floats(allow_nan=True, allow_infinity=True, width=32)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        row = trace(draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.floats(-3, 3, width=32)), optional)
        row.logprobs = torch.tensor([draw(number) for _ in row.logprobs])
        rows.append(row)
    return rows


def widened(batch: Trace, left: int, right: int, junk: float) -> Trace:
    """The batch with further columns, and `junk` wherever nothing is real."""

    def wide(value: Tensor, side: str, filler: float) -> Tensor:
        columns = (left, 0) if side == "left" else (0, right)
        before, after = (value.new_full((len(value), count, *value.shape[2:]), filler) for count in columns)
        return torch.cat([before, value, after], dim=1)

    values = dict(vars(batch))
    for column in fields(batch):
        value = values[column.name]
        if value is not None and "side" in column.metadata and value.dtype != torch.bool:
            side, filler = column.metadata["side"], junk if value.is_floating_point() else 123
            real = wide(getattr(batch, column.metadata["mask"]), side, False)
            values[column.name] = wide(value, side, filler)
            values[column.name][~real] = filler
        elif column.metadata.get("mask") == column.name:
            values[column.name] = wide(value, column.metadata["side"], False)
    return Trace(**values)


@QUICK
@given(elements())
def test_split_inverts_collate(rows: list[Trace]) -> None:
    assert all(same(got, put) for got, put in zip(Trace.collate(rows).split(), rows, strict=True))


@QUICK
@given(elements(), st.integers(0, 3), st.integers(0, 3), st.sampled_from([math.nan, math.inf, 1e30]))
def test_padding_is_never_read(rows: list[Trace], left: int, right: int, junk: float) -> None:
    batch = Trace.collate(rows)
    wide = widened(batch, left, right, junk)
    assert wide.mask.shape[1] == batch.mask.shape[1] + right
    assert all(same(got, put) for got, put in zip(wide.split(), rows, strict=True))
    assert torch.equal(wide.lengths(), batch.lengths())
    trimmed = wide.trim()
    assert trimmed.prompt.shape == batch.prompt.shape and trimmed.latents.shape == batch.latents.shape
    assert all(same(got, put) for got, put in zip(trimmed.split(), rows, strict=True))


@QUICK
@given(elements(), st.data())
def test_rows_do_not_meet(rows: list[Trace], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = Trace.collate(rows)[order].split()
    assert all(same(got, rows[row]) for got, row in zip(shuffled, order, strict=True))


@pytest.mark.parametrize("length", [0, 1])
def test_a_batch_of_empty_rows(length: int) -> None:
    batch = Trace.collate([trace(1, 0), trace(1, length)])
    assert batch.mask.shape == (2, length) and [len(row.logprobs) for row in batch.split()] == [0, length]


def test_optional_fields_may_be_left_out() -> None:
    given = trace(1, 2)
    made = Trace(given.prompt, given.prompt_mask, given.logprobs, given.mask, given.latents, given.score)
    assert made.segment is None and made.goal is None


def test_microbatches_golden() -> None:
    """Rows of 2 + 3, 1 + 1, 2 + 3 and 1 + 2 real entries, shortest first, equal ones in their order."""
    batch = Trace.collate([trace(2, 3, 10), trace(1, 1, 20), trace(2, 3, 30), trace(1, 2, 40)])
    parts = list(batch.microbatches(2))
    assert [rows.tolist() for rows, _ in parts] == [[1, 3], [0, 2]]
    assert [part.score.tolist() for _, part in parts] == [[20, 40], [10, 30]]
    assert [part.mask.shape[1] for _, part in parts] == [2, 3]
    for size in (None, 4, 9):
        ((rows, part),) = batch.microbatches(size)
        assert rows.tolist() == [0, 1, 2, 3] and part is batch
    assert [len(part) for _, part in batch.microbatches(3)] == [3, 1]


def test_padded_rows_golden() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    for side, values, mask in (
        ("right", [[1, 2], [3, 0]], [[True, True], [True, False]]),
        ("left", [[1, 2], [0, 3]], [[True, True], [False, True]]),
    ):
        found = padded_rows(rows, side=side)
        assert [part.tolist() for part in found] == [values, mask]
    assert padded_rows(rows)[0].tolist() == [[1, 2], [3, 0]]
    assert padded_rows(rows, 9)[0].tolist() == [[1, 2], [3, 9]]


@dataclass
class Told(Experience):
    """Every kind of field that is described or filled in its own way."""

    prompt: Tensor = padded("left", mask="prompt_mask")
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")
    response: Tensor = padded()
    mask: Tensor = padded(value=False)
    rewards: Tensor = padded()
    old_trunk: Tensor = torch.tensor(0.0)
    label: Tensor = torch.tensor(0)
    caption: Tensor | None = None
    noise: Tensor | None = field(default=None, metadata={"shape": (2, 3)})


def test_a_filled_batch_has_no_padding_and_leaves_out_what_is_none() -> None:
    batch = Told.filled(2, 3, 4)
    shapes = {name: None if value is None else (list(value.shape), value.dtype) for name, value in vars(batch).items()}
    number, whole = torch.float32, torch.int64
    assert shapes == {
        "place": None,
        **{"prompt": ([2, 3], whole), "prompt_mask": ([2, 3], torch.bool)},
        **{"response": ([2, 4], whole), "mask": ([2, 4], torch.bool), "rewards": ([2, 4], number)},
        **{"old_trunk": ([2], number), "label": ([2], number), "caption": None, "noise": ([2, 2, 3], number)},
    }
    ones = [name for name, value in vars(batch).items() if value is not None and bool(value.all())]
    assert ones == ["prompt", "prompt_mask", "response", "mask"]
    assert not any(vars(batch)[name].any() for name in ("rewards", "old_trunk", "label", "noise"))


def test_a_row_is_described_for_a_person() -> None:
    ids, real = torch.tensor([5, 6]), torch.ones(2).bool()
    caption = torch.tensor(list("a \N{EURO SIGN}".encode()), dtype=torch.uint8)
    rewards, noise = torch.tensor([1.0, -3.0]), torch.full((2, 3), 2.0)
    row = Told(ids, real, ids + 2, real, rewards, torch.tensor(1.0), torch.tensor(7), caption, noise)
    without = Told(ids[:1], real[:1], ids[:1], real[:1], rewards[:1], torch.tensor(1.0), torch.tensor(7))
    noises = {"sum": 12.0, "min": 2.0, "max": 2.0}
    assert Told.collate([row]).describe(str) == [
        {
            **{"prompt": "[5, 6]", "response": "[7, 8]", "rewards": {"sum": -2.0, "min": -3.0, "max": 1.0}},
            **{"caption": "a \N{EURO SIGN}", "noise": noises},
        }
    ]
    assert Told.collate([without]).describe(str) == [{"prompt": "[5]", "response": "[5]", "rewards": 1.0}]


def test_masks_that_are_none_or_count_something_else_have_no_length() -> None:
    @dataclass
    class Counted(Experience):
        mask: Tensor = padded(value=False)
        choices: Tensor | None = padded(mask="choice_sizes", default=None)
        choice_sizes: Tensor | None = padded(mask="mask", default=None)

    mask = torch.tensor([[True, True, False]])
    assert Counted(mask).lengths().tolist() == [2]
    assert Counted(mask, mask.int(), torch.tensor([[4, 5, 0]])).lengths().tolist() == [2]
