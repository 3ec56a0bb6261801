"""The losses of DPO by their names in `method.loss_type`, as functions of the completions' log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trlx_like.config.methods.dpo import DPOConfig
from trlx_like.functional.preference import (
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    discopop_loss,
    divergence_score,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    nca_pair_loss,
    robust_loss,
    sigmoid_loss,
    sorted_margin,
    sppo_hard_loss,
)


@dataclass
class Pairs:
    """Hold the log-probabilities of B pairs, each summed over the tokens of a completion. All fields are [B]."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios of policy to reference, for the chosen and for the rejected completions. [B] each"""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def margin(self, method: DPOConfig, *, per_token: bool = False) -> Tensor:
        """Subtract the score of the rejected completion from that of the chosen one.

        Args:
            method: Its divergence defines how a log-ratio becomes a score.
            per_token: Divide each score by the number of tokens of its completion first.

        Returns:
            The margin of each pair. [B]
        """
        scores = [divergence_score(d, method.f_divergence_type, method.f_alpha_divergence_coef) for d in self.ratios]
        if per_token:
            scores = [scores[0] / self.chosen_tokens, scores[1] / self.rejected_tokens]
        return scores[0] - scores[1]


def pair_loss(name: str, pairs: Pairs, method: DPOConfig) -> Tensor:
    """Compute a loss for each pair.

    Args:
        name: A name of `method.loss_type`, except "sft".
        pairs: Log-probabilities of the pairs.
        method: Options of the losses.

    Returns:
        The losses [B]. The losses "aot" and "aot_unpaired" compare sorted batches, so theirs belong to places in the
        sorted batch and not to pairs.

    Raises:
        ValueError: If there is no loss of that name.
    """
    beta, smoothing = method.beta, method.label_smoothing
    chosen, rejected = pairs.ratios
    match name:
        case "sigmoid":
            return sigmoid_loss(beta * pairs.margin(method), smoothing)
        case "sigmoid_norm":
            return sigmoid_loss(beta * pairs.margin(method, per_token=True), smoothing)
        case "hinge":
            return hinge_loss(beta * pairs.margin(method))
        case "ipo":
            return ipo_loss(pairs.margin(method, per_token=True), beta)
        case "robust":
            return robust_loss(beta * pairs.margin(method), smoothing)
        case "exo_pair":
            return exo_pair_loss(beta * pairs.margin(method), smoothing)
        case "discopop":
            return discopop_loss(beta * pairs.margin(method), method.discopop_tau)
        case "nca_pair":
            return nca_pair_loss(beta * chosen, beta * rejected)
        case "bco_pair":
            return bco_pair_loss(beta * chosen, beta * rejected)
        case "sppo_hard":
            return sppo_hard_loss(chosen, rejected, beta)
        case "apo_zero":
            return apo_zero_loss(beta * chosen, beta * rejected)
        case "apo_down":
            return apo_down_loss(beta * chosen, beta * rejected)
        case "aot":
            margin = sorted_margin(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
            return sigmoid_loss(beta * margin, smoothing)
        case "aot_unpaired":
            return sigmoid_loss(beta * sorted_margin(chosen, rejected), smoothing)
    raise ValueError(f"{name!r} is no loss on pairs.")
