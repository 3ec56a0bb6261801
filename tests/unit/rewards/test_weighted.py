"""Several reward functions as one: their sum, their names, and what may be a reward function at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.models.test_reward_model import sharp
from tests.unit.rewards.test_models import call
from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards import call_reward
from trlx_like.rewards.models import RewardModel
from trlx_like.rewards.weighted import WeightedRewards


def length(outputs: list[str], **_: Any) -> list[float]:
    return [float(len(output)) for output in outputs]


def letters(outputs: list[str], **_: Any) -> list[float | None]:
    return [float(output.count("b")) if output else None for output in outputs]


def test_weighted_rewards_golden() -> None:
    # Lengths 14 1 3 0 70; b's 0 1 1 None 70.
    assert call(WeightedRewards([length, letters], [1, -0.5])) == [14, 0.5, 2.5, 0, 35]
    assert call(WeightedRewards([letters])) == [0, 1, 1, None, 70]


def test_weighted_rewards_hand_on_what_came_with_the_prompt() -> None:
    def level(prompts: list[str], level: list[int]) -> list[int]:
        return [len(prompt) * number for prompt, number in zip(prompts, level, strict=True)]

    texts = {"samples": ["ab", "abc"], "prompts": ["a", "ab"], "outputs": ["b", "c"]}
    assert call_reward(WeightedRewards([level, length]), texts, [{"level": 2}, {"level": 3}]) == [3.0, 7.0]


def test_weighted_rewards_with_models() -> None:
    models = [RewardModel(sharp(tiny_config(), seed), tiny_tokenizer()) for seed in (0, 1)]
    first, second = (call(model) for model in models)
    expected = [2 * one - other for one, other in zip(first, second, strict=True)]
    assert call(WeightedRewards(models, [2, -1])) == pytest.approx(expected)


def test_weighted_rewards_that_cannot_be_added() -> None:
    with pytest.raises(ConfigError, match="a weight for each: 1 functions, 2 weights"):
        WeightedRewards([length], [1, 2])
    with pytest.raises(ConfigError, match="at least one function"):
        WeightedRewards([])
    with pytest.raises(RewardError, match="one per token"):
        call(WeightedRewards([lambda **_: [[1.0, 2.0]] * 5]))
    with pytest.raises(RewardError, match="returned 1 rewards for 5 samples"):
        call(WeightedRewards([length, lambda **_: [1.0]]))


@given(
    columns=st.integers(0, 6).flatmap(
        lambda rows: st.lists(
            st.lists(st.none() | st.floats(-1e3, 1e3), min_size=rows, max_size=rows), min_size=1, max_size=4
        )
    ),
    data=st.data(),
)
def test_the_sum_is_numpys_over_what_is_given(columns: list[list[float | None]], data: st.DataObject) -> None:
    """An abstention is a NaN that is left out; where all abstain there is none."""
    weights = data.draw(st.lists(st.floats(-10, 10), min_size=len(columns), max_size=len(columns)))
    table = np.array([[math.nan if entry is None else entry for entry in column] for column in columns])
    expected = np.nansum(np.array(weights)[:, None] * table, axis=0)
    got = WeightedRewards([length] * len(columns), weights).combined(columns)
    assert [reward is None for reward in got] == np.isnan(table).all(axis=0).tolist()
    assert [0.0 if reward is None else reward for reward in got] == pytest.approx(expected.tolist(), abs=1e-6)


def test_names_of_components() -> None:
    class Length:
        def __call__(self, outputs: list[str]) -> list[float]:
            return length(outputs)

    functions: list[Callable[..., Any]] = [
        length,
        partial(length),
        Length(),
        lambda outputs: length(outputs),
        Length().__call__,
    ]
    assert WeightedRewards(functions).names == ["length", "length_2", "Length", "lambda", "__call__"]
    assert WeightedRewards([length, length], names=["long", "long"]).names == ["long", "long_2"]
    with pytest.raises(ConfigError, match="has 1 functions and 2 names"):
        WeightedRewards([length], names=["a", "b"])
