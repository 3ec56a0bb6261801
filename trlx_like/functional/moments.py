"""Running mean and standard deviation of a stream of numbers, such as all scores of a run."""

from __future__ import annotations

import math


class RunningMoments:
    """Track the running count, mean and m2 = sum (x - mean)^2 of everything seen, merged batch by batch.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    eq. 2.1. The state consists of Python floats, which can be saved as JSON and do not drift. It starts empty.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.m2 = 0.0

    def update(self, count: float, mean: float, m2: float) -> None:
        """Add a batch of values, given their count, mean and sum of squared deviations.

        Args:
            count: How many values the batch has. 0 changes nothing.
            mean: Their mean.
            m2: Their sum of squared deviations from the mean. All three are as from `masked.masked_stats`, over all
                ranks.
        """
        if count == 0:
            return
        total = self.count + count
        delta = mean - self.mean
        self.m2 += m2 + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def var(self) -> float:
        """Return the unbiased variance m2 / (n - 1); 0 for fewer than two values."""
        return self.m2 / max(self.count - 1, 1.0)

    @property
    def std(self) -> float:
        """Return the standard deviation, or 1 if the values do not vary beyond float32 rounding, so that it can divide.

        trlX divides by NaN after a first batch of one, and by 0 after a batch of equal scores.
        """
        std = math.sqrt(self.var)
        return std if std > 1e-6 * abs(self.mean) else 1.0

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and m2."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
