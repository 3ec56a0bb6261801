"""Sums, means, variances and whitening over the real places of a padded tensor.

Masks are bool, True where a place is real. Whatever lies at padding (NaN and inf included) changes neither a
value nor a gradient. Variances are unbiased (n - 1) everywhere, in one process and merged over many; of one
value the variance is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8
"""Added to a variance before its root is divided by."""


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask, else 0. Its gradient at padding is exactly 0.

    Shapes: x, mask (bool) [*] -> [*]. A selection, not a product: 0 * NaN would be NaN.
    """
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """sum_i x_i [mask_i].

    Shapes: x, mask (bool) [*] -> []. The gradient that reaches x is exactly 0 at padding.
    """
    return zero_padding(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """sum_i x_i [mask_i] / max(sum_i [mask_i], 1): 0 when nothing is real.

    Shapes: x, mask (bool) [*] -> [].
    """
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_stats(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, mean, m2) with m2 = sum_i (x_i - mean)^2 over the real places: what `combine_stats` merges.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", eq. 1.1 (the two-pass form, which does not cancel). Shapes: x, mask (bool) [*] -> [], [], [],
    in x's dtype but at least float32. All are 0 when nothing is real.
    """
    x = zero_padding(x if x.dtype == torch.float64 else x.float(), mask)
    count = mask.sum().to(x.dtype)
    mean = x.sum() / count.clamp(min=1)
    return count, mean, masked_sum((x - mean).square(), mask)


def combine_stats(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n = sum n_k; mean = sum n_k mean_k / n; m2 = sum m2_k + n_k (mean_k - mean)^2.

    Source: Chan, Golub and LeVeque 1979, eq. 2.1, for K groups at once. Shapes: stats [K, 3], rows (n, mean,
    m2), one a rank or micro-batch -> [], [], []. Empty groups do not count; the merged numbers are those of
    all values together.
    """
    counts, means, m2s = stats.unbind(dim=1)  # [K] each
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return count, mean, (m2s + counts * (means - mean).square()).sum()


def unbiased_variance(count: Tensor, m2: Tensor) -> Tensor:
    """m2 / max(n - 1, 1), so that the variance of one value is 0 and not NaN.

    Shapes: count, m2 [*] -> [*].
    """
    return m2 / (count - 1).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, mean: Tensor, var: Tensor, center: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), plus the mean again unless `center`; 0 at padding.

    Source: trlX 0.7 `utils/modeling.py:whiten`, TRL 1.12 `masked_whiten`. Shapes: x, mask (bool) [*]; mean,
    var [] -> [*]. `center=False` scales the spread and keeps the mean (their `shift_mean=False`).

    Difference: mean and var come from the caller, who takes them over real places, and over all ranks (trlX
    whitens with its padding, and switches to the biased variance when distributed).
    """
    white = (zero_padding(x, mask) - mean) * torch.rsqrt(var + EPS)
    return zero_padding(white if center else white + mean, mask)


def masked_whiten(x: Tensor, mask: Tensor, center: bool = True) -> Tensor:
    """`whiten` by the mean and unbiased variance of x's own real places.

    Shapes: x, mask (bool) [*] -> [*]. For several ranks use `masked_stats`, `combine_stats` and `whiten`.
    """
    count, mean, m2 = masked_stats(x, mask)
    return whiten(x, mask, mean, unbiased_variance(count, m2), center)
