"""Advantages from rewards that are normalised by earlier rewards of the same prompt."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence


class PromptStatistics:
    """Keep the most recent rewards of each prompt, and normalise advantages by them.

    Source: Black et al. 2023, arXiv:2305.13301 (DDPO), sec. 5.1 and appendix; ddpo-pytorch @1958463 `stat_tracking.py`.

    Args:
        buffer_size: How many rewards are remembered for each prompt; 16 or 32 in the source.
        min_count: With fewer remembered rewards than this, a prompt is normalised by all rewards of the batch; 16 in
            the source.

    Difference: rewards are Python floats. In the source, integer rewards have their advantages truncated to integers.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.rewards: dict[str, deque[float]] = {}

    def advantages(self, prompts: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """Remember rewards and compute their advantages: A_i = (r_i - m) / (s + 1e-6).

        m and s are the mean and the standard deviation (n in the denominator) of the remembered rewards of the prompt,
        which include the given ones; if these are fewer than `min_count`, of all given rewards.

        Args:
            prompts: The prompt of each reward.
            rewards: The new rewards.

        Returns:
            The advantage of each reward.
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
        """Return the remembered rewards by prompt."""
        return {prompt: list(kept) for prompt, kept in self.rewards.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore what `state_dict` returned."""
        self.rewards = {prompt: deque(kept, maxlen=self.buffer_size) for prompt, kept in state.items()}


def normalized(rewards: Sequence[float]) -> list[float]:
    """Normalise rewards by their own mean and standard deviation: A_i = (r_i - m) / (s + 1e-6).

    Args:
        rewards: The rewards r_i.

    Returns:
        The advantages, all 0 if the rewards are equal. s has n in the denominator.
    """
    mean, std = _moments(rewards)
    return [_normal(reward, mean, std) for reward in rewards]


def _normal(reward: float, mean: float, std: float) -> float:
    """Normalise one reward."""
    return (reward - mean) / (std + 1e-6)


def _moments(values: Sequence[float] | deque[float]) -> tuple[float, float]:
    """Compute mean and standard deviation; for equal values exactly the value and 0."""
    if not values:
        return 0.0, 0.0
    first = values[0]
    mean = first + math.fsum(value - first for value in values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
