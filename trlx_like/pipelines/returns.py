"""Rewards that come with samples: checking them, standardising them, and assigning them to tokens."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from trlx_like.data.flat import View
from trlx_like.errors import DataError
from trlx_like.functional.reward_range import LARGEST_REWARD, dominant

logger = logging.getLogger(__name__)

SampleReward = float | list[float]
"""The reward of one sample: a number for all of it, one per output, or one per output token."""


class RowRewards(Sequence[SampleReward]):
    """Hold rewards that lie in the rows of the samples, and read them only if the samples have to be encoded.

    Args:
        make: Reads and checks the rewards, one per sample.
        about: What it makes of them, as JSON: together with the rows, this tells the rewards.
    """

    def __init__(self, make: Callable[[], Sequence[SampleReward]], about: Any) -> None:
        self.made, self.about = cache(make), about

    @classmethod
    def of(
        cls, rewards: Sequence[Any], samples: Sequence[Any], make: Callable[[], Sequence[SampleReward]], about: Any
    ) -> Sequence[SampleReward]:
        """Return what `make` makes of rewards: now, unless they are those that `View` reads from the samples."""
        return cls(make, about) if isinstance(rewards, View) and rewards.rows is samples else make()

    def __len__(self) -> int:
        return len(self.made())

    def __getitem__(self, row: Any) -> Any:
        return self.made()[row]


def check_rewards(rewards: Sequence[Any], count: int) -> list[SampleReward]:
    """Convert rewards to floats and lists of floats.

    Args:
        rewards: One entry per sample.
        count: The number of samples.

    Raises:
        DataError: The number of entries is wrong, or an entry is neither a finite number nor a list of such.
    """
    if isinstance(rewards, str) or not hasattr(rewards, "__len__"):
        raise DataError(f"rewards is a {type(rewards).__name__}; give a list of numbers.")
    if len(rewards) != count:
        raise DataError(f"rewards has {len(rewards)} entries for {count} samples; give one per sample.")
    read = [_read(reward, row) for row, reward in enumerate(rewards)]
    row = dominant([sum(reward) if isinstance(reward, list) else reward for reward in read])
    if row is not None:
        logger.warning("rewards[%d] is %r: it is so far from the others that their differences vanish.", row, read[row])
    return read


def _read(reward: Any, row: int) -> SampleReward:
    reward = reward.tolist() if hasattr(reward, "tolist") else reward
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    try:
        values = [finite(None if isinstance(value, str) else value) for value in (reward if several else [reward])]
    except (TypeError, ValueError):
        raise DataError(f"rewards[{row}] is {reward!r}; give a finite number, or a list of them.") from None
    if any(abs(value) > LARGEST_REWARD for value in values):
        raise DataError(f"rewards[{row}] is {reward!r}; its absolute value must not be above {LARGEST_REWARD:g}.")
    return values if several else values[0]


def finite(value: Any) -> float:
    """Convert a finite number, or text of one, to a float. Raise ValueError or TypeError for bools and all else."""
    number = float("nan") if isinstance(value, bool) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def standardized(rewards: Sequence[SampleReward]) -> list[SampleReward]:
    """Divide rewards by the standard deviation of the samples' returns, after subtracting their mean.

    The mean is subtracted only if every sample has a single reward: with several rewards per sample it would reward or
    punish length. If all returns are equal the rewards are returned unchanged.
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
    """Assign the rewards of a sample to its tokens.

    A single number goes to the last output token. One number per output goes to the last token of each output. One
    number per output token is used as it is; the one for an EOS that was added may be missing.

    Args:
        reward: The reward of the sample.
        is_output: Which tokens are outputs. [T]
        row: The number of the sample, for errors.

    Returns:
        One reward per token, 0 everywhere else. [T]

    Raises:
        DataError: The number of rewards fits none of these.
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
            "tokens (EOS included); give one number, one per output, or one per output token."
        )
    placed = [0.0] * len(is_output)
    for place, value in zip(places, given, strict=False):
        placed[place] = value
    return placed
