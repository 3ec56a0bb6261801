"""PPO's clipped losses and their metrics. Element-wise: the caller masks and sums.

Throughout, r = pi(a|s) / pi_old(a|s), with log r clamped to +-20. Beyond that r is a constant (about 5e8) without
gradient. The paper has no such bound. It changes nothing inside a trust region. Without it r overflows at log r > 88,
and an overflowed r has a NaN gradient even where the clipped branch, which has no gradient, is the larger one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trlx_like.functional.kl import MAX_LOG_RATIO, kl_k3
from trlx_like.functional.masked import masked_stats


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Compute the probability ratio of the present and the behaviour policy: r = exp(log pi - log pi_old).

    Source: Schulman et al. 2017, arXiv:1707.06347, sec. 3.

    Args:
        logprobs: Log-probabilities of the actions under the policy that is trained. [*]
        old_logprobs: Their log-probabilities under the behaviour policy, which sampled them. [*]

    Returns:
        The ratio r. [*]

    Difference: log r is clamped to +-20, outside of which the gradient is 0.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def rollout_ratio(
    logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, level: Literal["token", "sequence"]
) -> Tensor:
    """Compute how much likelier the learner finds what an engine sampled: pi(a|s) / mu(a|s), or its product over t.

    The policy gradient of samples from mu is weighted by min(ratio, C), without gradient through the ratio. It is
    unbiased but for the truncation at C, which bounds its variance.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated
    importance sampling; per token). The product over a sequence is `rollout_is: sequence` of verl.

    Args:
        logprobs: Log-probabilities under the learner before its first step on the samples. [B, R]
        sampling_logprobs: Log-probabilities that the engine sampled with. [B, R]
        mask: True on response tokens. [B, R] bool
        level: "token", or "sequence" for the product over the tokens of each response.

    Returns:
        The ratio of each token; of a sequence the same for all of its tokens. 1 on padding. [B, R]

    Difference: log ratios are clamped to +-20, as in `probability_ratio`.
    """
    difference = torch.where(mask, logprobs - sampling_logprobs, 0)
    if level == "sequence":
        difference = torch.where(mask, difference.sum(dim=1, keepdim=True), 0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float | None = None
) -> Tensor:
    """Compute PPO's clipped policy loss, to be minimised: max(-A r, -A clip(r, 1 - c, 1 + c_high)).

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7, negated; c_high is that of Yu et al. 2025, arXiv:2503.14476
    (DAPO), sec. 3.1.

    Args:
        logprobs: Log-probabilities of the actions under the policy that is trained. [*]
        old_logprobs: Their log-probabilities under the behaviour policy. [*]
        advantages: Advantages A of the actions. [*]
        cliprange: c, how far r may fall below 1.
        cliprange_high: c_high, how far r may rise above 1; None is the same as `cliprange`.

    Returns:
        The loss of each action. [*]
    """
    ratio = probability_ratio(logprobs, old_logprobs)
    high = cliprange if cliprange_high is None else cliprange_high
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))


def clip_sides(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float, cliprange_high: float
) -> tuple[Tensor, Tensor]:
    """Mark the actions whose gradient the clip removes: (r < 1 - c and A < 0), and (r > 1 + c_high and A > 0).

    Source: TRL 1.16 `grpo_trainer.py`, `clip_ratio/low_mean` and `clip_ratio/high_mean`.

    Args:
        logprobs: Log-probabilities of the actions under the policy that is trained. [*]
        old_logprobs: Their log-probabilities under the behaviour policy. [*]
        advantages: Advantages A of the actions. [*]
        cliprange: c, as in `clipped_surrogate`.
        cliprange_high: c_high, as in `clipped_surrogate`.

    Returns:
        1 where clipped at the lower bound, and 1 where clipped at the upper bound; 0 elsewhere. Each [*] float
    """
    ratio = probability_ratio(logprobs.detach(), old_logprobs.detach())
    low = (ratio < 1 - cliprange) & (advantages < 0)
    high = (ratio > 1 + cliprange_high) & (advantages > 0)
    return low.to(ratio.dtype), high.to(ratio.dtype)


def clip_fraction(logprobs: Tensor, old_logprobs: Tensor, cliprange: float) -> Tensor:
    """Mark the actions whose ratio has left the clip range: 1 if |r - 1| > c, else 0. Its mean is the clip fraction.

    Source: Stable-Baselines3 `ppo/ppo.py`, `clip_fraction`.

    Args:
        logprobs: Log-probabilities of the actions under the policy that is trained. [*]
        old_logprobs: Their log-probabilities under the behaviour policy. [*]
        cliprange: c, as in `clipped_surrogate`.

    Returns:
        1 or 0 for each action. [*] float, without gradient

    Difference: TRL and trlX count only actions for which the clipped branch is the larger one. This counts every ratio
    outside the range, whatever the sign of its advantage, so it is at least as large as theirs.
    """
    ratio = probability_ratio(logprobs.detach(), old_logprobs.detach())
    return ((ratio - 1).abs() > cliprange).to(ratio.dtype)


def ratio_metrics(logprobs: Tensor, old_logprobs: Tensor, cliprange: float | None = None) -> dict[str, Tensor]:
    """Compute the metrics of a probability ratio, by name: approx_kl, r, |r - 1|, and whether |r - 1| > c.

    Source: `approx_kl`, `probability_ratio` and `clip_fraction` of this file. Shapes: both [*] -> each [*], without
    gradient. The last one is left out without a range.
    """
    logprobs, old_logprobs = logprobs.detach(), old_logprobs.detach()
    ratio = probability_ratio(logprobs, old_logprobs)
    metrics = {
        "policy/approx_kl": approx_kl(logprobs, old_logprobs),
        "policy/ratio": ratio,
        "policy/ratio_deviation": (ratio - 1).abs(),
    }
    if cliprange is not None:
        metrics["policy/clip_fraction"] = clip_fraction(logprobs, old_logprobs, cliprange)
    return metrics


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None) -> Tensor:
    """Compute PPO's clipped value loss: max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    Source: the PPO paper has no value clipping; it is in openai/baselines `ppo2/model.py`, and detail 9 of
    Huang et al. 2022, "The 37 Implementation Details of PPO".

    Args:
        values: Predicted values V. [*]
        old_values: The values V_old that were predicted when the experience was made. [*]
        returns: Targets R. [*]
        cliprange_value: c; None is the unclipped (V - R)^2 / 2.

    Returns:
        The loss of each state. [*]
    """
    error = (values - returns).square()
    if cliprange_value is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return 0.5 * torch.maximum(error, (clipped - returns).square())


def approx_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(pi_old || pi) from actions sampled by pi_old: (r - 1) - log r, which is never negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k3. Shapes: logprobs of the policy that is trained and
    old_logprobs of the behaviour policy [*] -> [*].
    """
    return kl_k3(old_logprobs, logprobs)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Compute the fraction of the variance of returns that the values explain: 1 - Var(R - V) / Var(R).

    1 is perfect, 0 is no better than a constant, below 0 is worse than a constant.

    Source: Stable-Baselines3 `common/utils.py:explained_variance`.

    Args:
        values: Predicted values V. [*]
        returns: Returns R. [*]
        mask: True at real entries. [*] bool

    Returns:
        The explained variance. []

    Difference: it is 0, not NaN or a huge number, if the returns do not vary beyond float32 rounding.
    """
    _, _, residual = masked_stats(returns - values, mask)
    count, mean, total = masked_stats(returns, mask)
    varies = total > count * (1e-6 * mean).square()
    return torch.where(varies, 1 - residual / torch.where(varies, total, 1), 0)
