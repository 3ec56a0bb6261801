"""Sampling of tokens from their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Choose one token for each row by a random number: min {v: p_0 + ... + p_v > u sum p}.

    Source: inversion sampling, Devroye 1986, "Non-Uniform Random Variate Generation", sec. III.2. Needs one random
    number per row. `torch.multinomial` draws one per token, which dominates on a CPU when the vocabulary is large.

    Args:
        probabilities: Non-negative weights of the tokens; a row need not sum to 1. [B, V]
        uniform: A random number u in [0, 1) for each row. [B, 1] float64

    Returns:
        The sampled token ids. [B, 1] int64

    Raises:
        RuntimeError, IndexError: From torch, if a row is no distribution (NaN).
    """
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # The product is never rounded up to the sum, behind the last possible token: u is at most 1 - 2^-53, and what this
    # takes away from the sum is more than half of its distance to the next smaller number, or all of it.
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
