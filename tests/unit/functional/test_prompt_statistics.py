"""Rewards compared with earlier ones of the same prompt."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from tests.unit.functional.properties import QUICK
from tests.unit.trainers import ddpo_numpy as twin
from trlx_like.functional.prompt_statistics import PromptStatistics, normalized

ROUNDS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-20, 20).map(lambda n: n / 4)), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


def test_golden() -> None:
    known = PromptStatistics(buffer_size=3, min_count=2)
    # a has two: mean 2, deviation 1, so -1 and 1. b has one: all of them, 1 3 5, mean 3, deviation sqrt(8 / 3).
    # (5 - 3) / 1.6329932 = 1.2247449.
    assert known.advantages(["a", "a", "b"], [1, 3, 5]) == pytest.approx([-1, 1, 1.2247449], abs=2e-6)
    # b now has 5, 7: mean 6. a keeps its newest three: 3, 8, 4, mean 5, deviation sqrt(14 / 3) = 2.1602469.
    expected = [3 / 2.1602469, 1, -1 / 2.1602469]
    assert known.advantages(["a", "b", "a"], [8, 7, 4]) == pytest.approx(expected, abs=2e-6)


def test_whole_numbers_are_numbers() -> None:
    """ddpo-pytorch and TRL write advantages into an array of integers: [1, 2, 3, 4] gives [-1, 0, 0, 1]."""
    expected = [-1.3416408, -0.4472136, 0.4472136, 1.3416408]
    assert PromptStatistics(16, 16).advantages(list("aabb"), [1, 2, 3, 4]) == pytest.approx(expected, abs=2e-6)
    assert normalized([1, 2, 3, 4]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("value", [0.1, 1e9, -0.3])
def test_equal_rewards_say_nothing(value: float) -> None:
    assert normalized([value] * 3) == [0, 0, 0]
    assert PromptStatistics(4, 2).advantages(list("aaab"), [value] * 4) == [0, 0, 0, 0]


@QUICK
@given(ROUNDS, st.integers(1, 4), st.integers(1, 4))
def test_against_the_twin_over_a_restart(rounds: list[list[tuple[str, float]]], size: int, count: int) -> None:
    known = PromptStatistics(size, count)
    for given_round, expected in zip(rounds, twin.by_prompt(rounds, size, count), strict=True):
        restored = PromptStatistics(size, count)
        restored.load_state_dict(json.loads(json.dumps(known.state_dict())))
        prompts, rewards = zip(*given_round, strict=True)
        got = known.advantages(prompts, rewards)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert restored.advantages(prompts, rewards) == got
