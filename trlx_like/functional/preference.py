"""Losses on pairs of completions, one preferred to the other: DPO and its relatives. Element-wise: the caller sums.

Notation: c and r are the chosen and the rejected completion of a prompt. d = log pi(y|x) - log pi_ref(y|x) is the
log-ratio of one completion, summed over its tokens. beta d is its implicit reward (Rafailov et al. 2023,
arXiv:2305.18290, sec. 4). A margin m is the implicit reward of c minus that of r. All shapes are [B] -> [B], one
entry per pair.

`functional.sequences` computes the inputs: sums over tokens, lengths and weights.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

MAX_EXPONENT = 20.0
"""Above this exponent, exponentials continue as straight lines: e^20 = 5e8 is outside any sensible loss, and finite."""


def divergence_score(log_ratio: Tensor, kind: Divergence = "reverse_kl", coef: float = 0.5) -> Tensor:
    """Compute the score f'(e^d) of a completion for the f-divergence that keeps the policy near the reference.

    Here d is the log-ratio of policy and reference, summed over the completion's tokens.

    reverse_kl: d. forward_kl: 1 - e^-d. js_divergence: log 2 + log sigmoid(d).
    alpha_divergence: (e^((a - 1) d) - 1) / (a - 1).

    Source: Wang et al. 2023, arXiv:2309.16240, table 1, up to a constant that cancels in a difference of scores. Their
    alpha is 1 - a.

    Args:
        log_ratio: d of each completion. [B]
        kind: The divergence; reverse_kl is that of DPO.
        coef: a of alpha_divergence. 1 is reverse_kl, 0 is forward_kl.

    Returns:
        The scores. [B]

    Raises:
        ValueError: If there is no divergence of that name.

    Difference: above an exponent of 20, where e^x would soon overflow, its tangent at 20 is used, which keeps a
    gradient.
    """
    if kind == "reverse_kl" or (kind == "alpha_divergence" and coef == 1):
        return log_ratio
    if kind == "forward_kl":
        return -_expm1(-log_ratio)
    if kind == "js_divergence":
        return math.log(2) + logsigmoid(log_ratio)
    if kind == "alpha_divergence":
        return _expm1((coef - 1) * log_ratio) / (coef - 1)
    raise ValueError(f"kind ({kind!r}) must be reverse_kl, forward_kl, js_divergence or alpha_divergence.")


def sigmoid_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Compute the DPO loss, optionally with label smoothing: -(1 - e) log sigmoid(m) - e log sigmoid(-m).

    On margins of rewards per token it is the loss "sigmoid_norm"; on `sorted_margin` it is "aot".

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7 (DPO); Mitchell 2023, "A note on DPO with noisy preferences",
    eq. 3 (cDPO).

    Args:
        margin: m, the implicit reward of the chosen completion minus that of the rejected one. [B]
        label_smoothing: e, the assumed probability that a preference label is wrong.

    Returns:
        The loss of each pair. [B]
    """
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """Compute the robust DPO loss: (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2e).

    Its expectation over labels that are wrong with probability e is the DPO loss on correct labels.

    Source: Chowdhury et al. 2024, arXiv:2403.00409, eq. 12.

    Args:
        margin: m, the implicit reward of the chosen completion minus that of the rejected one. [B]
        label_smoothing: e, the probability that a preference label is wrong; below 1/2.

    Returns:
        The loss of each pair. [B]
    """
    return (-(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)) / (
        1 - 2 * label_smoothing
    )


def hinge_loss(margin: Tensor) -> Tensor:
    """Compute the hinge loss of a margin (SLiC): max(0, 1 - m).

    Source: Zhao et al. 2023, arXiv:2305.10425, eq. 1 (SLiC), on DPO's margin as in Liu et al. 2023, arXiv:2309.06657,
    sec. 3. Shapes: [B] -> [B].
    """
    return relu(1 - margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Compute the IPO loss, the squared distance of a margin from its target: (m - 1 / (2 beta))^2.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17, with beta for their tau.

    Args:
        margin: The difference of the scores per token of chosen and rejected, not multiplied by beta. [B]
        beta: Strength of the pull to the reference; a larger beta means a smaller target.

    Returns:
        The loss of each pair. [B]

    Difference: the paper's m is a difference of sums over tokens. Means over each completion's tokens, as in TRL, make
    the target independent of the length.
    """
    return (margin - 0.5 / beta).square()


def exo_pair_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """Compute the EXO loss, KL(policy || smoothed labels): p (log p - log(1 - e)) + q (log q - log e).

    Here p = sigmoid(m) and q = sigmoid(-m).

    Source: Ji et al. 2024, arXiv:2402.00856, eq. 16.

    Args:
        margin: m, the implicit reward of the chosen completion minus that of the rejected one. [B]
        label_smoothing: e; above 0, since the loss grows without bound as e approaches 0.

    Returns:
        The loss of each pair. [B]
    """
    chosen = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(label_smoothing))


def nca_pair_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """Compute the NCA loss of two rewards: -log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2.

    Unlike DPO's loss it depends on the level of each reward, not only on their difference.

    Source: Chen et al. 2024, arXiv:2402.05369, NCA for two responses with rewards of 1 and 0. Shapes: implicit rewards
    c (chosen) and r (rejected), each [B] -> [B].
    """
    return -logsigmoid(chosen_reward) - 0.5 * (logsigmoid(-chosen_reward) + logsigmoid(-rejected_reward))


def bco_pair_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """Compute the BCO loss, that of a binary classifier: -log sigmoid(c) - log sigmoid(-r).

    Source: Jung et al. 2024, arXiv:2404.04656 (BCO). Shapes: implicit rewards c (chosen) and r
    (rejected), each [B] -> [B].

    Difference: the paper subtracts a running mean from both rewards; like TRL, this does not.
    """
    return -logsigmoid(chosen_reward) - logsigmoid(-rejected_reward)


def sppo_hard_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute the SPPO loss: (d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2.

    It pulls the chosen log-ratio to 1 / (2 beta) and the rejected one to -1 / (2 beta).

    Source: Wu et al. 2024, arXiv:2405.00675, eq. 4.7, with probability 1 that the chosen completion wins.

    Args:
        chosen: Log-ratio d_c of the chosen completion. [B]
        rejected: Log-ratio d_r of the rejected completion. [B]
        beta: Strength of the pull to the reference.

    Returns:
        The loss of each pair. [B]
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """Compute the APO-zero loss: 1 - sigmoid(c) + sigmoid(r).

    It raises the chosen reward and lowers the rejected one. It is meant for chosen texts that are better than the
    model's own.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7. Shapes: implicit rewards c (chosen) and r
    (rejected), each [B] -> [B].
    """
    return 1 - chosen_reward.sigmoid() + rejected_reward.sigmoid()


def apo_down_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """Compute the APO-down loss: sigmoid(c) + 1 - sigmoid(c - r).

    It lowers both rewards, the rejected one more. It is meant for chosen texts that are worse than the model's own.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8. Shapes: implicit rewards c (chosen) and r
    (rejected), each [B] -> [B].
    """
    return chosen_reward.sigmoid() + 1 - (chosen_reward - rejected_reward).sigmoid()


def unpaired_loss(reward: Tensor, desirable: Tensor, point: Tensor | float) -> Tensor:
    """Compute the KTO loss of single completions: 1 - sigmoid(r - z) if desirable, else 1 - sigmoid(z - r).

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8, without the weights of the two kinds. With z = 0 it is
    APO-zero on single completions (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7; TRL's apo_zero_unpaired).

    Args:
        reward: Implicit reward r of each completion. [B]
        desirable: True for the completions that were liked. [B] bool
        point: z, the reference point: beta times the KL divergence of policy and reference, without gradient.

    Returns:
        The loss of each completion, between 0 and 1. [B]
    """
    return torch.where(desirable, point - reward, reward - point).sigmoid()


def discopop_loss(margin: Tensor, tau: float = 0.05) -> Tensor:
    """Compute the DiscoPOP loss, logistic below and exponential above 0: -(1 - w) log sigmoid(m) + w e^-m.

    Here w = sigmoid(m / tau).

    Source: Lu et al. 2024, arXiv:2406.08414, eq. 5.

    Args:
        margin: m, the implicit reward of the chosen completion minus that of the rejected one. [B]
        tau: Width of the transition from one to the other.

    Returns:
        The loss of each pair. [B]

    Difference: below m = -20 a straight line replaces e^-m. There w has long been 0, and 0 times inf would be NaN.
    """
    weight = (margin / tau).sigmoid()
    return -(1 - weight) * logsigmoid(margin) + weight * (1 + _expm1(-margin))


def sorted_margin(better: Tensor, worse: Tensor) -> Tensor:
    """Subtract the i-th smallest of `worse` from the i-th smallest of `better`.

    The margins compare two distributions of rewards instead of two completions of one prompt.

    Source: Melnyk et al. 2024, arXiv:2406.05882, sec. 3 (AOT).

    Args:
        better: For the loss "aot", log pi(c) - log pi(r); for "aot_unpaired", d_c. [B]
        worse: For "aot", the same difference under the reference; for "aot_unpaired", d_r. [B]

    Returns:
        The margins, sorted, so no longer in the order of the rows. They depend on which rows form a batch. [B]
    """
    return better.sort().values - worse.sort().values


def _expm1(x: Tensor) -> Tensor:
    """Compute e^x - 1, continued beyond x = 20 by its tangent there."""
    return x.clamp(max=MAX_EXPONENT).expm1() + math.exp(MAX_EXPONENT) * (x - MAX_EXPONENT).clamp(min=0)
