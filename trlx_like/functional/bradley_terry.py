"""The loss of a reward model on pairs, and the term that keeps its rewards around zero."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log sigmoid(r_c - r_r - m): how surprised a Bradley-Terry model with these rewards is by the preference.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin m is from Touvron et al. 2023, arXiv:2307.09288,
    eq. 2. Shapes: rewards and margin [B] -> [B].
    """
    return -logsigmoid(chosen - rejected - margin)


def off_center(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(r_c + r_r)^2: pairs say nothing about the level of rewards, and this pulls it to zero.

    Source: Eisenstein et al. 2023, arXiv:2312.09244, sec. 2. Shapes: [B], [B] -> [B].
    """
    return (chosen + rejected).square()


pair_loss = bradley_terry_loss
"""The former name of `bradley_terry_loss`."""
