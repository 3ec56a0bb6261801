"""Sums, means, variances and whitening over the unmasked entries of a padded tensor.

Masks are bool and True at real entries. Padding, even NaN or inf, influences neither values nor gradients. Variances
are unbiased (n - 1) everywhere, within a process and merged over ranks; the variance of a single value is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8
"""Added to a variance before its square root is divided by."""


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Replace the entries at padding by 0, with a gradient of exactly 0 there.

    It selects instead of multiplying, because 0 * NaN is NaN. Shapes: x, mask (bool) [*] -> [*].
    """
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum the unmasked entries: sum_i x_i [mask_i]. The gradient is exactly 0 at padding.

    Shapes: x, mask (bool) [*] -> [].
    """
    return zero_padding(x, mask).sum()


def masked_stats(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute count, mean and m2 = sum_i (x_i - mean)^2 of the unmasked entries, which `combine_stats` can merge.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances". The computation is in float32, or float64 for float64 input.

    Args:
        x: Values. [*]
        mask: True at real entries. [*] bool

    Returns:
        Count, mean (0 without entries) and m2. Each []
    """
    x = zero_padding(x if x.dtype == torch.float64 else x.float(), mask)
    count = mask.sum().to(x.dtype)
    mean = x.sum() / count.clamp(min=1)
    return count, mean, masked_sum((x - mean).square(), mask)


def combine_stats(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the statistics of K groups: mean = sum n_k mean_k / n; m2 = sum m2_k + n_k (mean_k - mean)^2.

    Source: Chan, Golub and LeVeque 1979, eq. 2.1, for K groups at once.

    Args:
        stats: One row (count, mean, m2) per rank or micro-batch, as `masked_stats` computes them; groups with count 0
            have no influence. [K, 3]

    Returns:
        Count, mean and m2 of all values together. Each []
    """
    counts, means, m2s = stats.unbind(dim=1)  # [K] each
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return count, mean, (m2s + counts * (means - mean).square()).sum()


def unbiased_variance(count: Tensor, m2: Tensor) -> Tensor:
    """Compute a variance from its count and sum of squared deviations: m2 / max(n - 1, 1).

    The variance of a single value is thus 0, not NaN. Shapes: count, m2 [*] -> [*].
    """
    return m2 / (count - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, mean: Tensor, var: Tensor, center: bool = True) -> Tensor:
    """Whiten values by a given mean and variance: (x - mean) / sqrt(var + 1e-8).

    Source: trlX 0.7 `utils/modeling.py:whiten`, TRL 1.12 `masked_whiten`.

    Args:
        x: Values. [*]
        mask: True at real entries. [*] bool
        mean: The mean, over the entries of all ranks. []
        var: The unbiased variance, over the entries of all ranks. []
        center: False adds the mean again, so that only the spread is scaled (`shift_mean=False` in trlX and TRL).

    Returns:
        The whitened values, 0 at padding. [*]

    Difference: trlX takes mean and variance over padding too, and the biased variance when distributed.
    """
    white = (zero_padding(x, mask) - mean) * torch.rsqrt(var + EPS)
    return zero_padding(white if center else white + mean, mask)
