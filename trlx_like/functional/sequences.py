"""Numbers of whole completions made of numbers of their tokens. Padding never counts, whatever lies there."""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.masked import zero_padding


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """sum_t x_t over each row's real places.

    Shapes: values, mask (bool) [B, R] -> [B].
    """
    return zero_padding(values, mask).sum(dim=1)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """sum_t x_t / max(T, 1) over each row's T real places.

    Shapes: values, mask (bool) [B, R] -> [B].
    """
    return sequence_sums(values, mask) / mask.sum(dim=1).clamp(min=1)


def length_desensitized(logprobs: Tensor, mask: Tensor, shared: Tensor, alpha: float) -> Tensor:
    """sum_{t <= l} log pi_t + alpha sum_{t > l} log pi_t, with l the length of the shorter completion of a pair.

    Source: Liu et al. 2024, arXiv:2409.06411 (LD-DPO), sec. 3. Shapes: logprobs, mask (bool) [B, R] from the left,
    shared [B] -> [B]. alpha = 1 is the plain sum; alpha = 0 does not see how much longer one of a pair is.
    """
    place = mask.cumsum(dim=1)  # counts from 1
    weights = torch.where(place <= shared[:, None], 1.0, alpha)
    return sequence_sums(logprobs * weights, mask)


def policy_weights(logprobs: Tensor, log_collision: Tensor, mask: Tensor) -> Tensor:
    """exp(mean_t (log pi(y_t) - log sum_v pi(v)^2)), without gradient: near 1 for what the policy itself would say.

    Source: Zhou et al. 2024, arXiv:2406.11827 (WPO), eq. 2. Shapes: logprobs, log_collision = log sum_v pi(v)^2, mask
    (bool) [B, R] -> [B]. A row without real places has weight 1.
    """
    with torch.no_grad():
        total = sequence_sums(logprobs - log_collision, mask)
        return (total / mask.sum(dim=1).clamp(min=1)).exp()
