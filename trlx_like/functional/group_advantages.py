"""Advantages without a critic: each response is compared with the other responses to the same prompt.

Scores are a table with one row per prompt and one column per response. The mask is True where there is a score; masked
entries influence nothing, and their advantage is 0. `token_weights` and `overlong_punishment` are two further formulas
that group methods share.
"""

from __future__ import annotations

from math import comb
from typing import Literal

import torch
from torch import Tensor

from trlx_like.functional.masked import unbiased_variance, zero_padding

LossType = Literal["dapo", "grpo", "dr_grpo"]

STD_EPS = 1e-4
"""Added to a standard deviation of scores before dividing by it."""


def group_means(scores: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean score of each group: m = sum_i r_i / n.

    Args:
        scores: Scores r_i of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool

    Returns:
        The means; 0 for a group without scores. [P, 1]
    """
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return zero_padding(scores, mask).sum(dim=1, keepdim=True) / count


def group_stds(scores: Tensor, mask: Tensor) -> Tensor:
    """Compute the unbiased standard deviation of the scores of each group: sqrt(sum_i (r_i - m)^2 / (n - 1)).

    Args:
        scores: Scores r_i of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool

    Returns:
        The deviations; 0 for fewer than two scores, and exactly 0 for equal scores. [P, 1]
    """
    m2 = group_centered(scores, mask).square().sum(dim=1, keepdim=True)
    return unbiased_variance(mask.sum(dim=1, keepdim=True), m2).sqrt()


def group_centered(scores: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean of its group from each score: A_i = r_i - m.

    Source: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO), sec. 3.2.

    Args:
        scores: Scores r_i of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool

    Returns:
        The advantages; exactly 0 in a group of equal scores, and where the mask is False. [P, G]
    """
    varied = zero_padding(scores, mask & ~group_ties(scores, mask))
    means = group_means(varied, mask)
    return zero_padding(varied - means, mask)


def group_ties(scores: Tensor, mask: Tensor) -> Tensor:
    """Tell which groups have only equal scores, so that their advantages are all 0.

    Source: Yu et al. 2025, arXiv:2503.14476 (DAPO), sec. 3.2.

    Args:
        scores: Scores of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool

    Returns:
        True for a group of equal scores, and for one with fewer than two. [P, 1] bool
    """
    highest = scores.masked_fill(~mask, -torch.inf).amax(dim=1, keepdim=True)
    lowest = scores.masked_fill(~mask, torch.inf).amin(dim=1, keepdim=True)
    return highest <= lowest


def scaled(advantages: Tensor, std: Tensor | float) -> Tensor:
    """Divide advantages by a standard deviation: A / (s + 1e-4).

    With `group_centered` and `group_stds` this is GRPO's A_i = (r_i - m) / (s + 1e-4).

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO), sec. 4.1.2.

    Args:
        advantages: Centred scores. [P, G]
        std: The standard deviation s, of each group [P, 1] or of all scores (one number).

    Returns:
        The scaled advantages. [P, G]

    Difference: the 1e-4 is not in the paper but in TRL 1.16 `grpo_trainer.py`. The paper does not say whether the
    standard deviation is the unbiased one; here and in TRL it is.
    """
    return advantages / (std + STD_EPS)


def leave_one_out(scores: Tensor, mask: Tensor) -> Tensor:
    """Subtract from each score the mean of the other scores of its group: A_i = r_i - sum_{j != i} r_j / (n - 1).

    It is computed as n / (n - 1) (r_i - m).

    Source: Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO).

    Args:
        scores: Scores r_i of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool

    Returns:
        The advantages; 0 for a group with a single score. [P, G]
    """
    count = mask.sum(dim=1, keepdim=True)
    return group_centered(scores, mask) * count / (count - 1).clamp(min=1)


def best_of(scores: Tensor, mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compare the expected best score of k responses, of which one is response i, with that of k others.

    v_i = mean over all sets S of k - 1 other responses of max(r_i, max S), and A_i = v_i - (mean over all sets S of k
    other responses of max S). The gradient of E[max of k scores] is k E[A_i grad log p_i]. With k = 1 they are the
    score and its advantage by `leave_one_out`.

    Source: Walder and Karkhanis 2025, arXiv:2505.15201 (PKPO), the estimator of max_g@k with a leave-one-out baseline.

    Args:
        scores: Scores r_i of the responses to each prompt. [P, G]
        mask: True where there is a score. [P, G] bool
        k: Number of responses of which the best counts; a group of n has at most n - 1.

    Returns:
        The values v_i, of which only differences within a group count, and the advantages A_i; 0 for a group of equal
        scores or of a single one, and where the mask is False. Both [P, G].

    Difference: the paper's estimate is larger by k; so the size of a step does not depend on k here.
    """
    if k == 1:
        return scores, leave_one_out(scores, mask)
    values, advantages = torch.zeros_like(scores), torch.zeros_like(scores)
    for group in (mask & ~group_ties(scores, mask)).any(dim=1).nonzero()[:, 0].tolist():
        own = scores[group, mask[group]]
        n, size = len(own), min(k, int(mask[group].sum()) - 1)
        others = own.expand(n, n)[~torch.eye(n, dtype=torch.bool)].view(n, n - 1).sort(dim=1).values
        with_own = torch.maximum(others, own[:, None]) @ _largest(n - 1, size - 1).to(own) if size > 1 else own
        values[group, mask[group]] = with_own
        advantages[group, mask[group]] = with_own - others @ _largest(n - 1, size).to(own)
    return values, advantages


def _largest(n: int, size: int) -> Tensor:
    """Return the chance of each of n sorted numbers to be the largest of `size` of them. [n] float64"""
    return torch.tensor([comb(place, size - 1) / comb(n, size) for place in range(n)], dtype=torch.float64)


def prefix_advantages(centered: Tensor, advantages: Tensor, groups: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Compare each token with the responses that begin as its own does: A_t = (A_(t-1) + sum_j (r_i - r_j)) / n.

    The sum is over the n responses j of the group that share the first t tokens of response i, which is one of them;
    A_0 is the advantage of the response. The baseline r_i - A_t is thus the mean score of these n responses, with the
    baseline before in place of r_i. It depends neither on the token nor on the tokens after it, so it adds no bias.

    Source: Tran et al. 2025, arXiv:2509.18314 (TEMPO): a prefix's value is the mean over the responses with it.

    Args:
        centered: Scores r_i; only differences within a group count. [B]
        advantages: Advantages A_0 of the responses. [B]
        groups: Number of the group of each response. [B] int64
        tokens: Token ids of the responses. [B, R] int64
        mask: True on the response tokens. [B, R] bool

    Returns:
        The advantages; those of padding mean nothing. [B, R]

    Difference: TEMPO adds the change of a prefix's value at each token to GRPO's advantage. Here the value replaces the
    mean of the group. It leaves the own score out, and where few responses are left it stays near the value before.
    """
    ids = tokens.masked_fill(~mask, -1) + 1
    prefixes, columns = groups, [advantages]
    for column in ids[:, :-1].T:
        prefixes, counts = torch.stack([prefixes, column]).unique(dim=1, return_inverse=True, return_counts=True)[1:]
        if not (counts > 1).any():
            break
        sums = torch.zeros_like(counts, dtype=centered.dtype).index_add(0, prefixes, centered)
        count = counts[prefixes]
        columns.append((columns[-1] + count * centered - sums[prefixes]) / count)
    columns += columns[-1:] * (tokens.shape[1] - len(columns))
    return torch.stack(columns, dim=1)


def token_weights(mask: Tensor, kind: LossType, *, max_length: int) -> Tensor:
    """Compute weights w_t of tokens so that sum_t w_t l_t, divided by a count, is the chosen average of the losses l_t.

    dapo: sum_i sum_t l / sum_i T_i, so w = 1, divided by the tokens. Every token counts the same.
    grpo: sum_i (sum_t l / T_i) / responses, so w = 1 / T_i, divided by the responses. Every response counts the same.
    dr_grpo: sum_i (sum_t l / max_length) / responses, so w = 1 / max_length, divided by the responses. With
    dr_grpo the length of a response does not change the weight of its tokens.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8; Shao et al. 2024, arXiv:2402.03300, eq. 3; Liu et al. 2025,
    arXiv:2503.20783, sec. 3.2.

    Args:
        mask: True on the response tokens, T_i of them in row i. [B, R] bool
        kind: Which average.
        max_length: The longest response that generation allows; used by dr_grpo only.

    Returns:
        The weight of every token of a row. [B, 1] float
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1).float()  # [B, 1]
    if kind == "dapo":
        return torch.ones_like(lengths)
    return 1 / (lengths if kind == "grpo" else torch.full_like(lengths, max_length))


def overlong_punishment(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Compute DAPO's soft penalty of long responses: clip((max_length - cache - length) / cache, -1, 0).

    It is 0 up to max_length - cache tokens, and then falls linearly to -1 at max_length.

    Source: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 13.

    Args:
        lengths: Numbers of response tokens. [*]
        max_length: The longest response that generation allows.
        cache: Over how many tokens before max_length the penalty grows.

    Returns:
        The penalties, to be added to the scores. [*] float
    """
    return ((max_length - cache - lengths) / cache).clamp(-1, 0)
