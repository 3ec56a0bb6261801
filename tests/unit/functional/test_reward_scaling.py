"""Scores over a standard deviation, by hand. The mean comes off the last token of each response."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from trlx_like.functional.reward_scaling import RewardScaling

# Responses of two, one and no tokens, and one of three; padding holds what must not matter.
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
SCORES = torch.tensor([[0.0, 6.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 8.0]])

# Two rounds of two scores. 1 and 5: mean 3, squared distances 4 + 4 = 8, variance 8 / 1. Then 3 and 3.
FIRST = {"count": 2.0, "mean": 3.0, "m2": 8.0, "std": 8**0.5}
SECOND = {"count": 2.0, "mean": 3.0, "m2": 0.0, "std": 1.0}


def scaling(
    kind: Literal["running", "ref"] | None, center: bool = False, mean: float | None = None, std: float | None = None
) -> RewardScaling:
    return RewardScaling(kind, center=center, ref_mean=mean, ref_std=std)


def test_without_a_kind_scores_stay() -> None:
    made = scaling(None, center=True)
    assert made(SCORES, MASK, **FIRST) is SCORES
    assert made.state_dict() == {"ref_mean": None, "ref_std": None, "moments": {"count": 0.0, "mean": 0.0, "m2": 0.0}}


def test_the_deviation_of_all_scores_so_far() -> None:
    """After the first round sqrt(8); after both 1, 5, 3, 3: the squared distances are 8, and 8 / 3 the variance."""
    made = scaling("running")
    torch.testing.assert_close(made(SCORES, MASK, **FIRST), SCORES / math.sqrt(8))
    torch.testing.assert_close(made(SCORES, MASK, **SECOND), SCORES / math.sqrt(8 / 3))


def test_the_running_mean_comes_off_the_last_token() -> None:
    """The mean is 3, over a deviation of sqrt(8). The response without a token keeps it at padding."""
    got = scaling("running", center=True)(SCORES, MASK, **FIRST) * math.sqrt(8)
    torch.testing.assert_close(got[MASK], torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 5.0]))
    assert got[0, 2] == got[1, 1] == got[1, 2] == 0


def test_the_running_mean_is_that_of_all_rounds() -> None:
    """Two scores of mean 3, then two of mean 9: the mean is 6, the squared distances are 8 + 8 + 4 * 9 = 52."""
    made = scaling("running", center=True)
    made(SCORES, MASK, **FIRST)
    got = made(SCORES, MASK, **{**FIRST, "mean": 9.0}) * math.sqrt(52 / 3)
    torch.testing.assert_close(got[MASK], torch.tensor([0.0, 0.0, -2.0, 0.0, 2.0, 2.0]))


def test_the_given_reference_stays() -> None:
    """(score - 2) / 4 in every round, whatever its own statistics are."""
    made = scaling("ref", center=True, mean=2.0, std=4.0)
    for statistics in (FIRST, SECOND):
        got = made(SCORES, MASK, **statistics)
        assert got[MASK].tolist() == [0.0, 1.0, 0.5, 0.0, 0.5, 1.5]


def test_the_first_round_is_the_reference_of_all() -> None:
    made = scaling("ref", center=True)
    for statistics in (FIRST, {"count": 9.0, "mean": 70.0, "m2": 5.0, "std": 12.0}):
        got = made(SCORES, MASK, **statistics) * math.sqrt(8)
        torch.testing.assert_close(got[MASK], torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0, 5.0]))


def test_a_first_round_of_equal_scores_divides_by_1() -> None:
    made = scaling("ref")
    assert torch.equal(made(SCORES, MASK, count=2.0, mean=3.0, m2=0.0, std=0.0), SCORES)
    assert torch.equal(made(SCORES, MASK, **FIRST), SCORES)


@pytest.mark.parametrize("kind", ["running", "ref"])
def test_a_checkpoint_goes_on_where_it_was(kind: Literal["running", "ref"]) -> None:
    made, restored = scaling(kind, center=True), scaling(kind, center=True)
    made(SCORES, MASK, **FIRST)
    restored.load_state_dict(made.state_dict())
    later = {"count": 3.0, "mean": -1.0, "m2": 6.0, "std": 3**0.5}
    assert torch.equal(restored(SCORES, MASK, **later), made(SCORES, MASK, **later))
    assert restored.state_dict() == made.state_dict()
