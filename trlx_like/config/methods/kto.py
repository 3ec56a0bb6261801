"""Options of KTO: those of TRL's KTOTrainer that define the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trlx_like.config.method import DropoutMethodConfig, TextMethodConfig
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfReference


class KTOConfig(DropoutMethodConfig, TextMethodConfig):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024): learn from completions that were liked or disliked."""

    beta: Applied[float] = Field(default=0.1, gt=0)
    """Strength of the pull to the reference. A smaller value lets the policy go further."""
    loss_type: Applied[Literal["kto", "apo_zero_unpaired"]] = "kto"
    """Reference point of the loss. kto: the KL divergence of policy and reference; apo_zero_unpaired: 0."""
    desirable_weight: Applied[float] = Field(default=1.0, ge=0)
    """Weight of the completions that were liked."""
    undesirable_weight: Applied[float] = Field(default=1.0, ge=0)
    """Weight of the completions that were disliked."""
    precompute_ref_log_probs: OfReference[bool] = False
    """Compute reference log-probabilities once, before training, and keep no reference in memory."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if not self.desirable_weight and not self.undesirable_weight:
            words = "0 does not go with method.desirable_weight 0: nothing would be learned."
            yield at("method.undesirable_weight", words)
