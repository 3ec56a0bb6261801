"""Mean and spread of a stream of numbers, such as the scores that a reward function has given so far."""

from __future__ import annotations

import math


class RunningMoments:
    """n, mean and m2 = sum (x - mean)^2 of everything seen, merged batch by batch.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", eq. 2.1. Python floats, so that the state is JSON and does not drift. Starts empty: n = 0.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.m2 = 0.0

    def update(self, count: float, mean: float, m2: float) -> None:
        """Add a batch by its `masked.masked_stats`, merged over ranks first when there are several."""
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        self.m2 += m2 + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def var(self) -> float:
        """m2 / (n - 1), 0 for fewer than two values."""
        return self.m2 / max(self.count - 1, 1.0)

    @property
    def std(self) -> float:
        """Root of `var`, safe to divide by: 1 while there is no spread beyond float32 rounding to speak of.

        trlX divides by NaN after a first batch of one, and by 0 after a batch of equal scores.
        """
        std = math.sqrt(self.var)
        return std if std > 1e-6 * abs(self.mean) else 1.0

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
