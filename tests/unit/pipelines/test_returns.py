"""Rewards that come with samples: what is refused, how they are scaled, on which tokens they end up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import tiny_tokenizer
from trlx_like.errors import DataError
from trlx_like.pipelines.dialogues import encode_dialogues
from trlx_like.pipelines.returns import check_rewards, place_rewards, standardized


def test_numbers_of_every_kind_become_floats() -> None:
    rewards = check_rewards([1, 2.5, np.float32(3), torch.tensor(4.0), torch.tensor([1.0, 2.0]), (5, 6)], 6)
    assert rewards == [1.0, 2.5, 3.0, 4.0, [1.0, 2.0], [5.0, 6.0]]
    array: Any
    for array in (torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])):
        assert check_rewards(array, 2) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([1.0], "rewards has 1 entries for 2 samples; give one per sample."),
        ("12", "rewards is a str; give a list of numbers."),
        (3.0, "rewards is a float; give a list of numbers."),
        ([1.0, math.nan], "rewards[1] is nan; give a finite number, or a list of them."),
        ([[1.0, math.inf], 1.0], "rewards[0] is [1.0, inf]; give a finite number, or a list of them."),
        ([1e16, 1.0], "rewards[0] is 1e+16; its absolute value must not be above 1e+15."),
        ([None, 1.0], "rewards[0] is None; give a finite number, or a list of them."),
        ([True, 1.0], "rewards[0] is True; give a finite number, or a list of them."),
        (["1", 1.0], "rewards[0] is '1'; give a finite number, or a list of them."),
    ],
)
def test_what_is_no_reward_is_refused_with_its_row(rewards: Any, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        check_rewards(rewards, 2)
    assert str(error.value) == sentence


def test_an_outlier_is_warned_of_with_its_row(caplog: pytest.LogCaptureFixture) -> None:
    check_rewards([0.1, 0.2, [-1e6, 0.5], 0.3], 4)
    assert "rewards[2] is [-1000000.0, 0.5]: it is so far from the others" in caplog.text


def test_standardized_golden() -> None:
    # Returns 1, 3, 5: mean 3, unbiased deviation 2.
    assert standardized([1.0, 3.0, 5.0]) == [-1.0, 0.0, 1.0]
    # Returns 1, 3, 5 again, but one of them is of two rewards: no shift.
    assert standardized([1.0, [2.0, 1.0], 5.0]) == [0.5, [1.0, 0.5], 2.5]


@pytest.mark.parametrize("rewards", [[7.0, 7.0], [0.0, 0.0], [3.0], [[1.0, 2.0], 3.0]])
def test_rewards_without_a_spread_stay_as_they_are(rewards: list[Any]) -> None:
    assert standardized(rewards) == rewards


def test_where_rewards_go_golden() -> None:
    # prompt, output of two tokens, prompt, output of three; the last is EOS.
    is_output = [False, True, True, False, False, True, True, True]
    assert place_rewards(9.0, is_output, 0) == [0, 0, 0, 0, 0, 0, 0, 9]
    assert place_rewards([4.0, 9.0], is_output, 0) == [0, 0, 4, 0, 0, 0, 0, 9]
    assert place_rewards([1.0, 2.0, 3.0, 4.0, 5.0], is_output, 0) == [0, 1, 2, 0, 0, 3, 4, 5]
    assert place_rewards([1.0, 2.0, 3.0, 4.0], is_output, 0) == [0, 1, 2, 0, 0, 3, 4, 0]
    # Of plain text everything is output but the first token, which nothing precedes.
    assert place_rewards([1.0, 2.0], [True, True, True], 0) == [0, 1, 2]


def test_another_number_of_rewards_is_refused() -> None:
    with pytest.raises(DataError) as error:
        place_rewards([1.0, 2.0, 3.0], [False, True, True, False, False, True, True, True], 4)
    assert str(error.value) == (
        "rewards[4] has 3 numbers for a sample of 2 outputs and 5 output tokens (EOS included); give one number, one "
        "per output, or one per output token."
    )


def test_what_truncation_takes_at_the_end_is_not_lost() -> None:
    # a | b c . a b . cut to 3: the rewards of what is gone go to the last output that is left.
    (whole,) = encode_dialogues(["abcde"], tiny_tokenizer(), 20, [[1.0, 2.0, 3.0, 4.0]])
    assert whole.rewards == [0, 1, 2, 3, 4, 0]
    (cut,) = encode_dialogues(["abcde"], tiny_tokenizer(), 3, [[1.0, 2.0, 3.0, 4.0]])
    assert cut.rewards == [0, 1, 9]
    (cut,) = encode_dialogues([("ab", "cd", "e", "fg")], tiny_tokenizer(), 5, [7.0])
    assert cut.is_output == [False, False, True, True, False]
    assert cut.rewards == [0, 0, 0, 7, 0]


def test_what_truncation_takes_at_the_beginning_is_gone() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = "left"
    (cut,) = encode_dialogues(["abcde"], tokenizer, 3, [[1.0, 2.0, 3.0, 4.0]])
    assert cut.rewards == [3, 4, 0]
