"""Thresholds of rejection sampling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional.properties import NUMBERS, QUICK
from trlx_like.functional.selection import MARGIN, percentile_at, score_thresholds

SCORES = st.lists(st.lists(NUMBERS, min_size=1, max_size=6), min_size=1, max_size=4)
SHARES = st.floats(0, 1)


def tensors(scores: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(of_prompt, dtype=torch.float64) for of_prompt in scores]


def test_the_percentile_rises_and_starts_again() -> None:
    # trlX's defaults: .7 to .95 in 4 steps of .0625.
    assert [percentile_at(step, 0.7, 0.95, 4) for step in range(4)] == pytest.approx([0.7, 0.7625, 0.825, 0.8875])
    assert percentile_at(0, 0.9, 0.2, 1) == 0.9


def test_thresholds_golden() -> None:
    """Median of 0, 1, 2, 6 is half-way from 1 to 2; that of 10, 20 is 15; 3 is alone. Lowest 1.5, highest 15."""
    thresholds = score_thresholds(tensors([[6, 0, 2, 1], [10, 20], [3]]), 0.5)
    assert thresholds.tolist() == pytest.approx([1.5 + MARGIN, 15 - MARGIN, 3])
    # The .75 quantile lies .75 * 3 = 2.25 places up: 2 + .25 * (6 - 2) = 3, and 10 + .75 * 10 = 17.5.
    thresholds = score_thresholds(tensors([[6, 0, 2, 1], [10, 20], [5]]), 0.75)
    assert thresholds.tolist() == pytest.approx([3 + MARGIN, 17.5 - MARGIN, 5])


def test_scores_of_any_format_have_thresholds_in_float64() -> None:
    assert score_thresholds([torch.tensor([0.0, 1.0]), torch.tensor([3, 5])], 0.5).dtype == torch.float64
    for dtype in (torch.float32, torch.int64):  # the least number above 0 is that of float64
        assert score_thresholds([torch.tensor([0, 0, 0, 1], dtype=dtype)], 0.5).tolist() == [math.ulp(0)]


def test_right_or_wrong() -> None:
    """Prompts that are never solved give nothing, those that are always solved all, others what is right."""
    never, often, always = tensors([[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    thresholds = score_thresholds([never, often, always], 0.7)
    assert thresholds.tolist() == pytest.approx([MARGIN, 1 - MARGIN, 1 - MARGIN])
    kept = [int((of >= at).sum()) for of, at in zip([never, often, always], thresholds, strict=True)]
    assert kept == [0, 3, 4]


def test_rare_hits_are_kept_without_the_misses() -> None:
    """The .5 quantile of both prompts is their lowest score, which three of four responses have."""
    first, second = tensors([[0, 0, 0, 2], [0, 0, 1, 3, 0, 0]])
    thresholds = score_thresholds([first, second], 0.5)
    assert [int((of >= at).sum()) for of, at in zip([first, second], thresholds, strict=True)] == [1, 2]


@pytest.mark.parametrize("scores", [[[1.0, 2.0]], [[1.5, 1.5], [1.5]]])
def test_equal_thresholds_are_lowered(scores: list[list[float]]) -> None:
    assert score_thresholds(tensors(scores), 0.5).tolist() == pytest.approx([1.5 - MARGIN] * len(scores))


def by_loops(scores: list[list[float]], share: float) -> list[float]:
    """The same in plain loops over single numbers."""
    found = []
    for of_prompt in map(sorted, scores):
        place = share * (len(of_prompt) - 1)
        below, above = math.floor(place), math.ceil(place)
        found.append(of_prompt[below] + (of_prompt[above] - of_prompt[below]) * (place - below))
    low, high = min(found) + MARGIN, max(found) - MARGIN
    for row, (value, of_prompt) in enumerate(zip(found, scores, strict=True)):
        found[row] = min(max(value, low), high)
        if found[row] <= min(of_prompt) < max(of_prompt):
            found[row] = math.nextafter(min(of_prompt), math.inf)
    return found


@QUICK
@given(SCORES, SHARES)
def test_loops_agree(scores: list[list[float]], share: float) -> None:
    assert score_thresholds(tensors(scores), share).tolist() == pytest.approx(by_loops(scores, share), abs=1e-9)


@QUICK
@given(SCORES, SHARES, st.randoms(use_true_random=False))
def test_the_order_of_scores_does_not_matter(scores: list[list[float]], share: float, random: object) -> None:
    shuffled = [random.sample(of_prompt, len(of_prompt)) for of_prompt in scores]  # type: ignore[attr-defined]
    assert torch.equal(score_thresholds(tensors(shuffled), share), score_thresholds(tensors(scores), share))


@QUICK
@given(SCORES, SHARES)
def test_something_is_always_kept(scores: list[list[float]], share: float) -> None:
    thresholds = score_thresholds(tensors(scores), share).tolist()
    assert any(max(of_prompt) >= at for of_prompt, at in zip(scores, thresholds, strict=True))


@QUICK
@given(SCORES, SHARES, SHARES)
def test_a_higher_percentile_keeps_less(scores: list[list[float]], one: float, other: float) -> None:
    low, high = (score_thresholds(tensors(scores), share) for share in sorted([one, other]))
    assert (low <= high + 1e-9).all()
