"""The losses of DPO by their names in `method.loss_type`, as functions of the completions' log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trlx_like.config.methods.dpo import DPOConfig
from trlx_like.functional import preference as losses
from trlx_like.functional.sequences import length_desensitized


@dataclass
class Pairs:
    """Hold the log-probabilities of B pairs, each summed over the tokens of a completion. All fields are [B]."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @classmethod
    def of(
        cls,
        policy: tuple[Tensor, Tensor],
        reference: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor],
        alpha: float = 1.0,
    ) -> Self:
        """Sum log-probabilities over the tokens of each completion.

        Args:
            policy: Log-probabilities of the tokens of the chosen [B, C] and of the rejected [B, J] completions.
            reference: The same under the reference.
            masks: True on the tokens that count.
            alpha: The weight of the extra tokens of the longer completion of a pair, see `length_desensitized`.
        """
        lengths = masks[0].sum(dim=1), masks[1].sum(dim=1)
        shared = torch.minimum(*lengths)

        def totals(sides: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            chosen, rejected = (length_desensitized(*side, shared, alpha) for side in zip(sides, masks, strict=True))
            return chosen, rejected

        return cls(*totals(policy), *totals(reference), *lengths)

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Log-ratios of policy to reference, for the chosen and for the rejected completions. [B] each"""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def metrics(self, beta: float) -> dict[str, Tensor]:
        """Return what is logged of each pair, with the implicit rewards at a beta. [B] each"""
        chosen, rejected = (beta * ratio for ratio in self.ratios)
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": self.chosen,
            "logps/rejected": self.rejected,
        }

    def rewards(self, method: DPOConfig) -> tuple[Tensor, Tensor]:
        """Return beta times the log-ratios: the implicit rewards of chosen and rejected completions."""
        chosen, rejected = self.ratios
        return method.beta * chosen, method.beta * rejected

    def margin(self, method: DPOConfig, *, per_token: bool = False) -> Tensor:
        """Subtract the score of the rejected completion from that of the chosen one.

        Args:
            method: Its divergence defines how a log-ratio becomes a score.
            per_token: Divide each score by the number of tokens of its completion first.

        Returns:
            The margin of each pair. [B]
        """
        scores = [
            losses.divergence_score(d, method.f_divergence_type, method.f_alpha_divergence_coef) for d in self.ratios
        ]
        if per_token:
            scores = [scores[0] / self.chosen_tokens, scores[1] / self.rejected_tokens]
        return scores[0] - scores[1]


FORMULAS: dict[str, Callable[[Pairs, DPOConfig], Tensor]] = {
    "sigmoid": lambda pairs, m: losses.sigmoid_loss(m.beta * pairs.margin(m), m.label_smoothing),
    "sigmoid_norm": lambda pairs, m: losses.sigmoid_loss(m.beta * pairs.margin(m, per_token=True), m.label_smoothing),
    "hinge": lambda pairs, m: losses.hinge_loss(m.beta * pairs.margin(m)),
    "ipo": lambda pairs, m: losses.ipo_loss(pairs.margin(m, per_token=True), m.beta),
    "robust": lambda pairs, m: losses.robust_loss(m.beta * pairs.margin(m), m.label_smoothing),
    "exo_pair": lambda pairs, m: losses.exo_pair_loss(m.beta * pairs.margin(m), m.label_smoothing),
    "discopop": lambda pairs, m: losses.discopop_loss(m.beta * pairs.margin(m), m.discopop_tau),
    "nca_pair": lambda pairs, m: losses.nca_pair_loss(*pairs.rewards(m)),
    "bco_pair": lambda pairs, m: losses.bco_pair_loss(*pairs.rewards(m)),
    "sppo_hard": lambda pairs, m: losses.sppo_hard_loss(*pairs.ratios, m.beta),
    "apo_zero": lambda pairs, m: losses.apo_zero_loss(*pairs.rewards(m)),
    "apo_down": lambda pairs, m: losses.apo_down_loss(*pairs.rewards(m)),
    "aot": lambda pairs, m: losses.sigmoid_loss(
        m.beta * losses.sorted_margin(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected),
        m.label_smoothing,
    ),
    "aot_unpaired": lambda pairs, m: losses.sigmoid_loss(
        m.beta * losses.sorted_margin(*pairs.ratios), m.label_smoothing
    ),
}
"""The losses [B] on pairs by name. `config.methods.dpo.LOSSES` says which options each of them takes.

The losses "aot" and "aot_unpaired" compare sorted batches, so theirs belong to places in the sorted batch and not to
pairs.
"""
