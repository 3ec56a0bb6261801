"""Rewards that hide the differences of all others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from trlx_like.functional.masked import whiten
from trlx_like.functional.reward_range import dominant


@pytest.mark.parametrize(
    ("rewards", "place"),
    [
        ([0.1, 0.5, 1e6, 0.9], 2),
        ([-1e7, 1.0, 2.0, 3.0], 0),
        ([1.0, 1.0, 1.0, 1e9], 3),
        ([100.0, 100.1, 99.9, 1e6], 3),
        ([0.0, 0.0, 0.0, 1.0], None),
        ([0.3, 0.30000001, 0.3, 1.0], None),
        ([1.0, 2.0, 3.0, 1000.0], None),
        ([1.0, 2.0, 1e9], 2),  # three are enough
        ([1.0, 1e9], None),
        ([0.0, 0.0, 1.0, 100001.0], 3),  # 1e5 times a range of 1 from the median, 1
        ([0.0, 0.0, 1.0, 100000.5], None),
        ([0.0, 1.0, 1.0, 50000.0], None),
        ([-50000.0, 0.0, 1.0, 1.0], None),
        ([1000.0, 1000.0, 1000.5, 101020.5], None),  # 1e-3 of the larger, 1.0005, is what counts as their range
        ([0.0] * 4, None),
        ([-100.0, -100.1, -99.9, 1e6], 3),
        ([0.0, 100.0, 1e6, 0.0], None),
        ([-1e9, 0.0, 0.0, 0.0, 0.01], 0),
        ([], None),
        ([5.0] * 8, None),
    ],
)
def test_dominant_rewards(rewards: list[float], place: int | None) -> None:
    assert dominant(rewards) == place


@given(st.lists(st.floats(-1.0, 1.0), min_size=4, max_size=20))
def test_ordinary_rewards_have_no_dominant_one_unless_they_are_nearly_equal(rewards: list[float]) -> None:
    """The distance from the median is at most 2, so the others must be closer than 2e-5 for one to dominate."""
    place = dominant(rewards)
    if place is not None:
        others = rewards[:place] + rewards[place + 1 :]
        assert max(others) - min(others) <= 2e-5 and max(map(abs, others)) <= 2e-2


def test_a_dominant_reward_hides_the_others_when_whitened() -> None:
    """What the bound is about: the whitened rewards of the others differ by less than 1e-4."""
    values = torch.tensor([[0.0, 1.0, 0.5, 1e6]])
    whitened = whiten(values, torch.ones_like(values).bool(), values.mean(), values.var())
    assert float(whitened[0, :3].max() - whitened[0, :3].min()) < 1e-4
