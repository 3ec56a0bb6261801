"""The Bradley-Terry loss of a reward model on preference pairs, and a penalty that centres its rewards."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Compute the negative log-likelihood of preferences under the Bradley-Terry model: -log sigmoid(r_c - r_r - m).

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin m is from Touvron et al. 2023, arXiv:2307.09288,
    eq. 2.

    Args:
        chosen: Reward r_c of the preferred completion of each pair. [B]
        rejected: Reward r_r of the other completion. [B]
        margin: By how much the chosen reward should exceed the rejected one, m. [B] or a number.

    Returns:
        The loss of each pair. [B]
    """
    return -logsigmoid(chosen - rejected - margin)


def off_center(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Penalise pairs of rewards that are not centred around zero: (r_c + r_r)^2.

    A preference only determines the difference of two rewards; this term determines their level.

    Source: Eisenstein et al. 2023, arXiv:2312.09244, sec. 2.

    Args:
        chosen: Reward r_c of the preferred completion of each pair. [B]
        rejected: Reward r_r of the other completion. [B]

    Returns:
        The penalty of each pair, to be scaled and added to the loss. [B]
    """
    return (chosen + rejected).square()


pair_loss = bradley_terry_loss
"""The former name of `bradley_terry_loss`."""
