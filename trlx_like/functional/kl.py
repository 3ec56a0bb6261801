"""KL divergence between policy and reference: per-token estimates, the exact sum, and its controller.

The estimators are for tokens sampled by the policy, d = log pi(a|s) - log pi_ref(a|s).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["kl", "abs", "mse", "k3"]

MAX_LOG_RATIO = 20.0
"""Largest log-ratio that is exponentiated, in nats: e^20 = 5e8 is outside any trust region, and finite."""


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d. Unbiased, may be negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k1; the penalty of Ziegler et al. 2019,
    arXiv:1909.08593, eq. 2. Shapes: both [*] -> [*].
    """
    return logprobs - ref_logprobs


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|d|.

    Source: TRL 0.11 `PPOTrainer._kl_penalty`, kind "abs". Shapes: both [*] -> [*].
    """
    return (logprobs - ref_logprobs).abs()


def kl_mse(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2. Biased, low variance, never negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k2. Shapes: both [*] -> [*].
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """e^-d - 1 + d. Unbiased, never negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k3. Shapes: both [*] -> [*].

    Differences: d below -20 counts as -20, so that one token which the policy has all but abandoned cannot
    turn the sum of a run into inf (its value is then 5e8, and its gradient 0). e^-d - 1 is taken at once, and
    what rounds below 0 is 0: subtracting 1 in float32 gives negative KLs for d around 1e-4.
    """
    d = (logprobs - ref_logprobs).clamp(min=-MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(min=0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """The estimator of that name: kl (k1), abs, mse (k2) or k3. ValueError for another name.

    Source: TRL 0.11 `PPOTrainer._kl_penalty`. Shapes: both [*] -> [*]. Its "full" needs whole distributions:
    `full_kl`.
    """
    estimators = {"kl": kl_k1, "abs": kl_abs, "mse": kl_mse, "k3": kl_k3}
    if kind not in estimators:
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(estimators)}.")
    return estimators[kind](logprobs, ref_logprobs)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(pi || pi_ref) = sum_v pi(v) (log pi(v) - log pi_ref(v)).

    Source: Kullback and Leibler 1951; TRL 0.11 `PPOTrainer._kl_penalty`, kind "full". Shapes: logits,
    ref_logits [*, V] -> [*], float32 (float64 for float64). A token of probability 0 under the policy (logit
    -inf) adds 0, without NaN in the value or the gradient.
    """
    logprobs, ref_logprobs = _log_softmax(logits), _log_softmax(ref_logits)  # [*, V]
    impossible = logprobs == -torch.inf
    d = logprobs.masked_fill(impossible, 0) - ref_logprobs.masked_fill(impossible, 0)
    return (logprobs.exp() * d).sum(dim=-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def adaptive_kl_coef(coef: float, kl: float, target: float, n_steps: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon).

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2, whose K = 0.1 is n_steps / horizon here, as in
    their code. coef: nats to reward; kl, target: nats a sequence, target > 0; n_steps: samples since the last
    update; horizon: samples.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * n_steps / horizon)
