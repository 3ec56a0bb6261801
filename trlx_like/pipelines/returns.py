"""Rewards that come with samples: checked, standardised, and put on the tokens that they are for."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from typing import Any

from trlx_like.errors import DataError

logger = logging.getLogger(__name__)

SampleReward = float | list[float]
"""Of one sample: a number for the whole of it, one for each output, or one for each output token."""


def check_rewards(rewards: Sequence[Any], count: int) -> list[SampleReward]:
    """The rewards of `count` samples as floats and lists of floats. DataError names the row of anything else."""
    if isinstance(rewards, str) or not hasattr(rewards, "__len__"):
        raise DataError(f"rewards is a {type(rewards).__name__}; give a list of numbers.")
    if len(rewards) != count:
        raise DataError(f"rewards has {len(rewards)} entries for {count} samples; give one a sample.")
    return [_read(reward, row) for row, reward in enumerate(rewards)]


def _read(reward: Any, row: int) -> SampleReward:
    reward = reward.tolist() if hasattr(reward, "tolist") else reward
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    try:
        values = [_number(value) for value in (reward if several else [reward])]
    except (TypeError, ValueError):
        raise DataError(f"rewards[{row}] is {reward!r}; give a finite number, or a list of them.") from None
    return values if several else values[0]


def _number(value: Any) -> float:
    number = float("nan") if isinstance(value, (bool, str)) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def standardized(rewards: Sequence[SampleReward]) -> list[SampleReward]:
    """Rewards divided by the standard deviation of the samples' returns, and less their mean if all are numbers.

    With several rewards a sample a shift would pay for length, so there is none. Returns that are all equal say
    nothing about what is better; they stay as they are.
    """
    returns = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
    deviation = statistics.stdev(returns) if len(returns) > 1 else 0.0
    if deviation <= 1e-8 * max(map(abs, returns), default=0.0):
        logger.warning("rewards are the same for all %d samples; they are not standardised.", len(returns))
        return list(rewards)
    shift = 0.0 if any(isinstance(reward, list) for reward in rewards) else statistics.fmean(returns)
    return [
        [value / deviation for value in reward] if isinstance(reward, list) else (reward - shift) / deviation
        for reward in rewards
    ]


def place_rewards(reward: SampleReward, is_output: Sequence[bool], row: int) -> list[float]:
    """A reward for each token of a sample [T]: 0 but at output tokens. The first token is never one.

    A number goes to the last output token; as many as there are outputs to the last token of each; otherwise there is
    one for every output token, where that of an EOS which was added may be left out.
    """
    tokens = [place for place, output in enumerate(is_output) if output and place]
    ends = [place for place in tokens if place + 1 == len(is_output) or not is_output[place + 1]]
    given = reward if isinstance(reward, list) else [reward]
    if not isinstance(reward, list):
        places = ends[-1:]
    elif len(given) == len(ends):
        places = ends
    elif len(given) in (len(tokens), len(tokens) - 1):
        places = tokens
    else:
        raise DataError(
            f"rewards[{row}] has {len(given)} numbers for a sample of {len(ends)} outputs and {len(tokens)} output "
            "tokens (EOS included); give one number, one an output, or one an output token."
        )
    placed = [0.0] * len(is_output)
    for place, value in zip(places, given, strict=False):
        placed[place] = value
    return placed
