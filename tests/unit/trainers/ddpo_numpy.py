"""DDPO's loss and advantages in numpy and float64, one number at a time, from the definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


def clipped(advantage: float, logprob: float, old: float, cliprange: float) -> float:
    """The worse of the plain and the clipped objective, negated."""
    ratio = math.exp(logprob - old)
    bounded = min(max(ratio, 1 - cliprange), 1 + cliprange)
    return -min(advantage * ratio, advantage * bounded)


def logprob(x: Array, mean: Array, std: float) -> float:
    """Mean over the numbers of one image."""
    return float(np.mean(-((x - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)))


def kl(mean: Array, ref_mean: Array, std: float) -> float:
    return float(np.mean((mean - ref_mean) ** 2 / (2 * std**2)))


def by_prompt(rounds: Sequence[Sequence[tuple[str, float]]], buffer_size: int, min_count: int) -> list[list[float]]:
    """Advantages of each round's rewards, all of its rewards being known before the first is compared."""
    kept: dict[str, list[float]] = {}
    found = []
    for given in rounds:
        for prompt, reward in given:
            kept[prompt] = [*kept.get(prompt, []), reward][-buffer_size:]
        everything = [reward for _, reward in given]
        advantages = []
        for prompt, reward in given:
            compared = kept[prompt] if len(kept[prompt]) >= min_count else everything
            advantages.append(float((reward - np.mean(compared)) / (np.std(compared) + 1e-6)))
        found.append(advantages)
    return found
