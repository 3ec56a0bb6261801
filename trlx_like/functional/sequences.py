"""Numbers of whole completions, computed from numbers of their tokens. Padding is ignored, whatever it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.masked import zero_padding


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum each row over its unmasked tokens: sum_t x_t.

    Shapes: values, mask (bool) [B, R] -> [B].
    """
    return zero_padding(values, mask).sum(dim=1)


def sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Average each row over its T unmasked tokens: sum_t x_t / max(T, 1).

    Shapes: values, mask (bool) [B, R] -> [B].
    """
    return sequence_sums(values, mask) / mask.sum(dim=1).clamp(min=1)


def length_desensitized(logprobs: Tensor, mask: Tensor, shared: Tensor, alpha: float) -> Tensor:
    """Sum log-probabilities with a smaller weight beyond the length l of the pair's shorter completion (LD-DPO).

    sum_{t <= l} log pi_t + alpha sum_{t > l} log pi_t.

    Source: Liu et al. 2024, arXiv:2409.06411 (LD-DPO), sec. 3.

    Args:
        logprobs: Log-probabilities log pi_t. [B, R]
        mask: True on real tokens, which start at the left. [B, R] bool
        shared: l, the length of the shorter completion of the pair. [B]
        alpha: The weight of tokens beyond l. 1 is the plain sum; with 0 the additional length has no influence.

    Returns:
        The weighted sums. [B]
    """
    if alpha == 1:
        return sequence_sums(logprobs, mask)
    place = mask.cumsum(dim=1)  # counts from 1
    weights = torch.where(place <= shared[:, None], 1.0, alpha)
    return sequence_sums(logprobs * weights, mask)


def policy_weights(logprobs: Tensor, log_collision: Tensor, mask: Tensor) -> Tensor:
    """Compute WPO's weight of a completion, without gradient: exp(mean_t (log pi(y_t) - log sum_v pi(v)^2)).

    It is near 1 for completions that the policy itself would sample.

    Source: Zhou et al. 2024, arXiv:2406.11827 (WPO), eq. 2.

    Args:
        logprobs: log pi(y_t) of each token. [B, R]
        log_collision: log sum_v pi(v)^2 at each token. [B, R]
        mask: True on real tokens. [B, R] bool

    Returns:
        The weights; 1 for a row without real tokens. [B]
    """
    with torch.no_grad():
        total = sequence_sums(logprobs - log_collision, mask)
        return (total / mask.sum(dim=1).clamp(min=1)).exp()
