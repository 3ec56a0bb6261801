"""How much better a response is than the others to the same prompt: advantages without a critic.

Scores come as a table: a row is a prompt, its entries are the responses to it. The mask is True where there is a score;
whatever lies elsewhere changes nothing, and the advantage there is 0. `token_weights` and `overlong_punishment` are the
other two formulas that methods on groups share.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trlx_like.functional.masked import unbiased_variance, zero_padding

LossType = Literal["dapo", "grpo", "dr_grpo"]

STD_EPS = 1e-4
"""Added to a deviation of scores before it is divided by."""


def group_means(scores: Tensor, mask: Tensor) -> Tensor:
    """m = sum_i r_i / n over the n scores of each group; 0 without any.

    Shapes: scores, mask (bool) [P, G] -> [P, 1].
    """
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return zero_padding(scores, mask).sum(dim=1, keepdim=True) / count


def group_stds(scores: Tensor, mask: Tensor) -> Tensor:
    """sqrt(sum_i (r_i - m)^2 / (n - 1)), 0 for fewer than two scores and exactly 0 for equal ones.

    Shapes: scores, mask (bool) [P, G] -> [P, 1].

    Equal scores are told by comparing them: the mean of three times 0.1 is not 0.1 in floating point.
    """
    m2 = group_centered(scores, mask).square().sum(dim=1, keepdim=True)
    return unbiased_variance(mask.sum(dim=1, keepdim=True), m2).sqrt()


def group_centered(scores: Tensor, mask: Tensor) -> Tensor:
    """A_i = r_i - m, with m the mean of the group; exactly 0 in a group of equal scores.

    Source: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO), sec. 3.2. Shapes: scores, mask (bool) [P, G] -> [P, G].
    """
    varied = zero_padding(scores, mask & ~group_ties(scores, mask))
    means = group_means(varied, mask)
    return zero_padding(varied - means, mask)


def group_ties(scores: Tensor, mask: Tensor) -> Tensor:
    """Whether all scores of a group are equal, so that nothing can be learned from it. Also with one, or none.

    Source: Yu et al. 2025, arXiv:2503.14476 (DAPO), sec. 3.2. Shapes: scores, mask (bool) [P, G] -> [P, 1] bool.
    """
    highest = scores.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    lowest = scores.masked_fill(~mask, torch.inf).amin(dim=1, keepdim=True)
    return highest <= lowest


def scaled(advantages: Tensor, std: Tensor | float) -> Tensor:
    """A / (s + 1e-4). With `group_centered` and `group_stds`: A_i = (r_i - m) / (s + 1e-4).

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO), sec. 4.1.2, without the 1e-4, which is that of TRL 1.16
    `grpo_trainer.py`. The paper does not say which deviation; here and in TRL it is the unbiased one. Shapes:
    advantages [P, G], std [P, 1] (of each group) or one number (of all scores) -> [P, G].
    """
    return advantages / (std + STD_EPS)


def leave_one_out(scores: Tensor, mask: Tensor) -> Tensor:
    """A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) (r_i - m); 0 for a single score.

    Source: Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO). Shapes: scores, mask (bool) [P, G] -> [P, G].
    """
    count = mask.sum(dim=1, keepdim=True)
    return group_centered(scores, mask) * count / (count - 1).clamp(min=1)


def token_weights(mask: Tensor, kind: LossType, *, tokens: float, responses: float, max_length: int) -> Tensor:
    """w_t such that sum w_t l_t / tokens, summed over the global batch, is its loss:

    dapo: sum_i sum_t l / sum_i T_i, w = 1. Every token counts the same.
    grpo: sum_i (sum_t l / T_i) / responses, w = tokens / responses / T_i. Every response counts the same.
    dr_grpo: sum_i (sum_t l / max_length) / responses, w = tokens / responses / max_length. No length is favoured.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8; Shao et al. 2024, arXiv:2402.03300, eq. 3; Liu et al. 2025,
    arXiv:2503.20783, sec. 3.2, whose constant is the longest length that generation allows. Shapes: mask (bool) [B, R]
    -> [B, 1] float. tokens, responses: how many the global batch has.
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1).float()  # [B, 1]
    if kind == "dapo":
        return torch.ones_like(lengths)
    per = lengths if kind == "grpo" else torch.full_like(lengths, max_length)
    return tokens / max(responses, 1.0) / per


def overlong_punishment(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """0 up to max_length - cache tokens, then falling in a line to -1 at max_length.

    Source: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 13. Shapes: lengths [*] -> [*] float, to be added to scores.
    """
    return ((max_length - cache - lengths) / cache).clamp(-1, 0)
