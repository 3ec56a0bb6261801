"""Limits of rewards: the largest allowed value, and outliers that hide the differences of all other rewards."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_REWARD = 1e15
"""Largest absolute value of a reward. Squares of larger ones, summed over a round, can overflow float32."""

DOMINANT = 1e5
"""How many times the range of all other rewards an outlier must be away from them to hide their differences."""


def dominant(rewards: Sequence[float]) -> int | None:
    """Find a reward that makes the differences of all others vanish when rewards are standardised.

    Args:
        rewards: The rewards of a round. At least three are needed.

    Returns:
        The index of a reward whose distance from the median is at least `DOMINANT` times the range of the others, or
        1,000 times that if they are nearly equal, so that a sparse reward (0, 0, 1) is no outlier. None without one.
    """
    if len(rewards) < 3:
        return None
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    middle = rewards[order[len(order) // 2]]
    place = max(order[0], order[-1], key=lambda row: abs(rewards[row] - middle))
    others = order[1:] if place == order[0] else order[:-1]
    low, high = rewards[others[0]], rewards[others[-1]]
    scale = max(high - low, 1e-3 * max(abs(low), abs(high)))
    return place if scale > 0 and abs(rewards[place] - middle) >= DOMINANT * scale else None
