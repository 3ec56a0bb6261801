"""Losses on pairs of completions, one better than the other: DPO and its relatives. Element-wise: the caller sums.

Notation: c and r are the chosen and the rejected completion of a prompt, d = log pi(y|x) - log pi_ref(y|x) is the
log-ratio of one of them, summed over its tokens, and beta d is its implicit reward (Rafailov et al. 2023,
arXiv:2305.18290, sec. 4). A margin is a difference c - r of rewards. ls is log sigmoid.

What these need of the model (sums over tokens, lengths, weights) is in `functional.sequences`.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

MAX_EXPONENT = 20.0
"""Where exponentials go on as straight lines: e^20 = 5e8 is outside any sensible loss, and finite."""


def divergence_score(log_ratio: Tensor, kind: Divergence = "reverse_kl", coef: float = 0.5) -> Tensor:
    """f'(u) at u = e^d, for the f-divergence that the policy is held to the reference by.

    reverse_kl d; forward_kl 1 - e^-d; js_divergence log 2 + ls(d); alpha_divergence (e^((a - 1) d) - 1) / (a - 1).

    Source: Wang et al. 2023, arXiv:2309.16240, table 1, up to a constant, which a difference of scores does not see;
    a is `coef`, and their alpha is 1 - a. Shapes: [B] -> [B]. ValueError for another kind.

    a = 1 is reverse_kl and a = 0 forward_kl. Exponents above 20 go on as the tangent (`_expm1`), which keeps the
    gradient: the paper has no bound, and e^89 is inf in float32.
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
    """-(1 - e) ls(m) - e ls(-m).

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7 (DPO); with e > 0 Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3 (cDPO), for labels that are wrong with probability e. Shapes: [B] -> [B].

    Its other names: "sigmoid_norm" is this on margins of rewards a token, and "aot" on `sorted_margin`.
    """
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """(-(1 - e) ls(m) + e ls(-m)) / (1 - 2e): unbiased for labels that are wrong with probability e < 1/2.

    Source: Chowdhury et al. 2024, arXiv:2403.00409, eq. 12. Shapes: [B] -> [B].
    """
    return (-(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)) / (
        1 - 2 * label_smoothing
    )


def hinge_loss(margin: Tensor) -> Tensor:
    """max(0, 1 - m).

    Source: Zhao et al. 2023, arXiv:2305.10425, eq. 1 (SLiC), on DPO's margin as in Liu et al. 2023, arXiv:2309.06657,
    sec. 3. Shapes: [B] -> [B].
    """
    return relu(1 - margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """(m - 1 / (2 beta))^2, where m is a difference of scores a token, not multiplied by beta.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17, with beta for their tau. Shapes: [B] -> [B].

    Difference: the paper's m is of sums over tokens. Means over each completion's tokens, as TRL takes them, make the
    target 1 / (2 beta) the same for short and long texts.
    """
    return (margin - 0.5 / beta).square()


def exo_pair_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """p (log p - log(1 - e)) + q (log q - log e), p = sigmoid(m), q = sigmoid(-m): KL(policy || smoothed labels).

    Source: Ji et al. 2024, arXiv:2402.00856, eq. 16. Shapes: [B] -> [B]. label_smoothing must be above 0: towards 0
    it is infinite.
    """
    chosen = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(label_smoothing))


def nca_pair_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """-ls(c) - (ls(-c) + ls(-r)) / 2, of rewards c and r: unlike DPO it also says where each should be.

    Source: Chen et al. 2024, arXiv:2402.05369, NCA for two responses with rewards of 1 and 0. Shapes: both [B] -> [B].
    """
    return -logsigmoid(chosen_reward) - 0.5 * (logsigmoid(-chosen_reward) + logsigmoid(-rejected_reward))


def bco_pair_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """-ls(c) - ls(-r): a classifier that tells chosen from rejected.

    Source: Jung et al. 2024, arXiv:2404.04656 (BCO). Shapes: both [B] -> [B].

    Difference: the paper shifts both rewards by a running mean of them; like TRL's, this does not.
    """
    return -logsigmoid(chosen_reward) - logsigmoid(-rejected_reward)


def sppo_hard_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2, of log-ratios: the winner's goes up, the loser's down.

    Source: Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with a probability of 1 that the chosen one wins.
    Shapes: both [B] -> [B].
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """1 - sigmoid(c) + sigmoid(r): chosen up and rejected down, for chosen texts better than the model's own.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7. Shapes: both [B] -> [B].
    """
    return 1 - chosen_reward.sigmoid() + rejected_reward.sigmoid()


def apo_down_loss(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """sigmoid(c) + 1 - sigmoid(c - r): both down, rejected more, for chosen texts worse than the model's own.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8. Shapes: both [B] -> [B].
    """
    return chosen_reward.sigmoid() + 1 - (chosen_reward - rejected_reward).sigmoid()


def discopop_loss(margin: Tensor, tau: float = 0.05) -> Tensor:
    """-(1 - w) ls(m) + w e^-m, w = sigmoid(m / tau): logistic below 0, exponential above.

    Source: Lu et al. 2024, arXiv:2406.08414, eq. 5. Shapes: [B] -> [B].

    Difference: e^-m goes on as a line below m = -20, where w has long been 0: 0 times inf would be NaN.
    """
    weight = (margin / tau).sigmoid()
    return -(1 - weight) * logsigmoid(margin) + weight * (1 + _expm1(-margin))


def sorted_margin(better: Tensor, worse: Tensor) -> Tensor:
    """The i-th smallest of `better` minus the i-th smallest of `worse`: compares two distributions, not pairs.

    Source: Melnyk et al. 2024, arXiv:2406.05882, sec. 3 (AOT). Shapes: both [B] -> [B], no longer in the rows' order.

    For "aot" better is log pi(c) - log pi(r) and worse the same of the reference; for "aot_unpaired" they are d_c and
    d_r. The result belongs to the whole batch: it is another one for parts of it.
    """
    return better.sort().values - worse.sort().values


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1, from x = 20 on its tangent there."""
    return x.clamp(max=MAX_EXPONENT).expm1() + math.exp(MAX_EXPONENT) * (x - MAX_EXPONENT).clamp(min=0)
