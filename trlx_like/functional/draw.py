"""Drawing tokens from their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(probabilities: Tensor) -> Tensor:
    """min {v: p_0 + ... + p_v > u sum p}, with u uniform in [0, 1): token v with probability p_v / sum p.

    Source: inversion, Devroye 1986, "Non-Uniform Random Variate Generation", sec. III.2. Shapes: [B, V] -> [B, 1].

    One random number a row. `torch.multinomial` makes one for each token, which on a CPU takes longer than all that
    comes before it once the vocabulary is large. Sums are in float64: in float32 the rarest tokens would vanish in
    them. RuntimeError or IndexError, from torch, where there is no distribution (NaN).
    """
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    wanted = torch.rand_like(total) * total
    # Rounded up to the total, it would lie beyond the last token that is possible.
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(sums, torch.minimum(wanted, below), right=True)
