"""Rewards compared with earlier ones of the same prompt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence


class PromptStatistics:
    """The newest rewards of each prompt. Python floats, so integer rewards are numbers like others.

    Source: Black et al. 2023, arXiv:2305.13301 (DDPO), sec. 5.1 and appendix; ddpo-pytorch @1958463 `stat_tracking.py`,
    whose defaults are buffer_size 16 or 32 and min_count 16. There integer rewards give truncated advantages.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.rewards: dict[str, deque[float]] = {}

    def advantages(self, prompts: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """A_i = (r_i - m) / (s + 1e-6) over the kept rewards of the prompt, these included; where there are fewer
        than `min_count` of them, over all of these rewards. s is the deviation with n in the denominator.
        """
        for prompt, reward in zip(prompts, rewards, strict=True):
            self.rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        of_all = _moments(rewards)
        known = {
            prompt: _moments(self.rewards[prompt]) if len(self.rewards[prompt]) >= self.min_count else of_all
            for prompt in set(prompts)
        }
        return [_normal(reward, *known[prompt]) for prompt, reward in zip(prompts, rewards, strict=True)]

    def state_dict(self) -> dict[str, list[float]]:
        return {prompt: list(kept) for prompt, kept in self.rewards.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.rewards = {prompt: deque(kept, maxlen=self.buffer_size) for prompt, kept in state.items()}


def normalized(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - m) / (s + 1e-6) over all rewards; 0 where they are all equal."""
    mean, std = _moments(rewards)
    return [_normal(reward, mean, std) for reward in rewards]


def _normal(reward: float, mean: float, std: float) -> float:
    return (reward - mean) / (std + 1e-6)


def _moments(values: Sequence[float] | deque[float]) -> tuple[float, float]:
    """Mean and deviation. Equal values have a deviation of 0 and a mean that is their value."""
    if not values:
        return 0.0, 0.0
    first = values[0]
    mean = first + math.fsum(value - first for value in values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
