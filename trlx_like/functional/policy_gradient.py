"""PPO's clipped losses and the numbers that are watched with them. Element-wise: the caller masks and sums.

r = pi(a|s) / pi_old(a|s) throughout, with log r bounded to +-20: beyond it r is a constant (about 5e8)
without gradient. The paper has no bound. It changes nothing inside a trust region; without it r overflows at
log r > 88, and an overflowed r gives a NaN gradient even where the clipped branch, which has none, is the
larger one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trlx_like.functional.kl import MAX_LOG_RATIO, kl_k3
from trlx_like.functional.masked import masked_stats


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r = exp(log pi - log pi_old).

    Source: Schulman et al. 2017, arXiv:1707.06347, sec. 3. Shapes: both [*] -> [*].
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float | None = None
) -> Tensor:
    """max(-A r, -A clip(r, 1 - c, 1 + c_high)), to be minimised; c_high = c unless it is given.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7, negated; c_high is that of Yu et al. 2025, arXiv:2503.14476
    (DAPO), sec. 3.1. Shapes: all [*] -> [*].
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    high = cliprange if cliprange_high is None else cliprange_high
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))


def clip_sides(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float
) -> tuple[Tensor, Tensor]:
    """1 where the clip stops the gradient, else 0: (r < 1 - c and A < 0), (r > 1 + c_high and A > 0).

    Source: TRL 1.16 `grpo_trainer.py`, `clip_ratio/low_mean` and `clip_ratio/high_mean`. Shapes: all [*] -> two [*]
    float, without gradient.
    """
    ratio = probability_ratio(logprobs.detach(), old_logprobs.detach())
    low = (ratio < 1 - cliprange) & (advantages < 0)
    high = (ratio > 1 + cliprange_high) & (advantages > 0)
    return low.to(ratio.dtype), high.to(ratio.dtype)


def clip_fraction(logprobs: Tensor, old_logprobs: Tensor, cliprange: float) -> Tensor:
    """1 where |r - 1| > c, else 0.

    Source: Stable-Baselines3 `ppo/ppo.py`, `clip_fraction`. Shapes: both [*] -> [*] float, without gradient.

    Difference: TRL and trlX count only places where the clipped branch is the larger one. This counts every
    ratio that has left the range, whatever the sign of its advantage, and is the larger of the two.
    """
    ratio = probability_ratio(logprobs.detach(), old_logprobs.detach())
    return ((ratio - 1).abs() > cliprange).to(ratio.dtype)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; without a range, (V - R)^2 / 2.

    Source: the PPO paper has no value clipping; it is in openai/baselines `ppo2/model.py`, and detail 9 of
    Huang et al. 2022, "The 37 Implementation Details of PPO". Shapes: all [*] -> [*].
    """
    error = (values - returns).square()
    if cliprange_value is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return 0.5 * torch.maximum(error, (clipped - returns).square())


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(r - 1) - log r: KL(pi_old || pi) estimated on tokens of pi_old, never negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k3. Shapes: both [*] -> [*].
    """
    return kl_k3(old_logprobs, logprobs)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over real places: 1 is perfect, 0 no better than a constant, below 0 worse.

    Source: Stable-Baselines3 `common/utils.py:explained_variance`. Shapes: all [*], mask bool -> [].

    Difference: it is 0, not NaN or an enormous number, where the returns do not vary beyond float32 rounding.
    """
    _, _, residual = masked_stats(returns - values, mask)
    count, mean, total = masked_stats(returns, mask)
    varies = total > count * (1e-6 * mean).square()
    return torch.where(varies, 1 - residual / torch.where(varies, total, 1), 0)
