"""Divergences of policy and reference: estimates from sampled tokens, exact sums, and the KL controller.

The estimators are for tokens sampled from the policy, with d = log pi(a|s) - log pi_ref(a|s).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["kl", "abs", "mse", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, in nats, before they are exponentiated: e^20 = 5e8 is outside any trust region, and finite."""


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(pi || pi_ref) from sampled tokens without bias: log pi - log pi_ref. May be negative.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k1; the penalty of Ziegler et al. 2019,
    arXiv:1909.08593, eq. 2. Shapes: logprobs of the policy and ref_logprobs of the reference [*] -> [*].
    """
    return logprobs - ref_logprobs


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Penalise the distance of log-probabilities from the reference: |log pi - log pi_ref|.

    Source: TRL 0.11 `PPOTrainer._kl_penalty`, kind "abs". Shapes: logprobs of the policy and ref_logprobs of the
    reference [*] -> [*].
    """
    return (logprobs - ref_logprobs).abs()


def kl_mse(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(pi || pi_ref) from sampled tokens with low variance: (log pi - log pi_ref)^2 / 2. It is biased.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k2. Shapes: logprobs of the policy and ref_logprobs of the
    reference [*] -> [*].
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(pi || pi_ref) from sampled tokens without bias and never negative: e^-d - 1 + d.

    Here d = log pi - log pi_ref.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html, k3. Shapes: logprobs of the policy and ref_logprobs of the
    reference [*] -> [*].

    Differences: d below -20 counts as -20, where the estimate is 5e8 with gradient 0. Otherwise one token that the
    policy has all but abandoned could turn the sum of a whole run into inf. e^-d - 1 is computed by expm1, and rounding
    below 0 is clamped: subtracting 1 in float32 gives negative estimates for d around 1e-4.
    """
    d = (logprobs - ref_logprobs).clamp(min=-MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(min=0)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Compute the per-token KL penalty by the estimator of the given name.

    Source: TRL 0.11 `PPOTrainer._kl_penalty`, whose kind "full" needs whole distributions: see `full_kl`.

    Args:
        logprobs: Log-probabilities of the tokens under the policy. [*]
        ref_logprobs: Log-probabilities of the same tokens under the reference. [*]
        kind: "kl" (`kl_k1`), "abs" (`kl_abs`), "mse" (`kl_mse`) or "k3" (`kl_k3`).

    Returns:
        The penalty of each token. [*]

    Raises:
        ValueError: If there is no estimator of that name.
    """
    estimators = {"kl": kl_k1, "abs": kl_abs, "mse": kl_mse, "k3": kl_k3}
    if kind not in estimators:
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(estimators)}.")
    return estimators[kind](logprobs, ref_logprobs)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Compute the exact KL divergence over the vocabulary: KL(pi || pi_ref) = sum_v pi(v) (log pi(v) - log pi_ref(v)).

    Source: Kullback and Leibler 1951; TRL 0.11 `PPOTrainer._kl_penalty`, kind "full".

    Args:
        logits: Logits of the policy. -inf (probability 0) adds 0, without NaN in value or gradient. [*, V]
        ref_logits: Logits of the reference. [*, V]

    Returns:
        The divergence at each position. [*] float32, or float64 for float64 logits
    """
    return _full_kl(_log_softmax(logits), _log_softmax(ref_logits))


def forward_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Compute the exact KL divergence of the reference: KL(pi_ref || pi) = sum_v pi_ref(v) (log pi_ref(v) - log pi(v)).

    Source: Hinton et al. 2015, arXiv:1503.02531, sec. 2, up to the entropy of the reference. Shapes: logits of the
    policy and ref_logits of the reference [*, V] -> [*], as in `full_kl`.
    """
    return full_kl(ref_logits, logits)


def generalized_jsd(logits: Tensor, ref_logits: Tensor, beta: float) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence beta KL(pi_ref || m) + (1 - beta) KL(pi || m).

    Here m = beta pi_ref + (1 - beta) pi. It is at most the entropy of a coin with probability beta. Near beta = 0 its
    gradient is beta times that of `forward_kl`, and near beta = 1 it is 1 - beta times that of `full_kl`.

    Source: Agarwal et al. 2024, arXiv:2306.13649, eq. 1, with the reference as their P and the policy as their Q.

    Args:
        logits: Logits of the policy. A logit of -inf (probability 0) gives no NaN in value or gradient. [*, V]
        ref_logits: Logits of the reference. [*, V]
        beta: Weight of the reference, above 0 and below 1.

    Returns:
        The divergence at each position. [*] float32, or float64 for float64 logits
    """
    logprobs, ref_logprobs = _log_softmax(logits), _log_softmax(ref_logits)  # [*, V]
    impossible = torch.maximum(logprobs, ref_logprobs) == -torch.inf  # logaddexp of two -inf has a gradient of NaN
    ref_part, own_part = ref_logprobs + math.log(beta), logprobs + math.log1p(-beta)
    mixture = torch.logaddexp(ref_part.masked_fill(impossible, 0), own_part.masked_fill(impossible, 0))
    return beta * _full_kl(ref_logprobs, mixture) + (1 - beta) * _full_kl(logprobs, mixture)


def _full_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Compute sum_v p(v) (log p(v) - log q(v)) from log-probabilities [*, V]; v with p(v) = 0 adds 0 without NaN."""
    impossible = logprobs == -torch.inf
    d = logprobs.masked_fill(impossible, 0) - other.masked_fill(impossible, 0)
    return (logprobs.exp() * d).sum(dim=-1)


def _log_softmax(logits: Tensor) -> Tensor:
    """Compute log-softmax in float32, or in float64 for float64 logits."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def adaptive_kl_coef(coef: float, kl: float, target: float, n_steps: int, horizon: int) -> float:
    """Update the KL coefficient towards a target KL: coef (1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon).

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2; their K = 0.1 is n_steps / horizon here, as in their code.

    Args:
        coef: The present coefficient.
        kl: The measured KL per sequence, in nats.
        target: The wanted KL per sequence, in nats; above 0.
        n_steps: How many samples were seen since the last update.
        horizon: Over how many samples the coefficient adapts; larger is slower.

    Returns:
        The new coefficient.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * n_steps / horizon)
