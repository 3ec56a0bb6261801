"""Options of RLOO and REINFORCE++, by the names of TRL's RLOOTrainer where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trlx_like.config.methods.groups import GroupMethodConfig
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfReference, OfRollouts


class RLOOConfig(GroupMethodConfig):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024), or REINFORCE++ (Hu 2025)."""

    baseline: Applied[Literal["leave_one_out", "batch"]] = "leave_one_out"
    """Baseline of a score: the mean of the others in its group, or of the round, whitened (batch, REINFORCE++)."""
    loss_type: Applied[Literal["dapo", "grpo", "dr_grpo"]] = "dr_grpo"
    """What the loss averages over: tokens (dapo), responses (grpo), or tokens over a constant length (dr_grpo)."""
    beta: OfReference[float] = Field(default=0.05, ge=0)
    """Weight of the KL to the reference; 0: no KL, and no reference model is made."""
    kl_in: OfRollouts[Literal["loss", "reward"]] = "reward"
    """Where the KL acts: added to each token's loss (estimator k3), or subtracted from the scores (k1)."""

    def group_problems(self) -> Iterator[Problem]:
        if self.baseline == "leave_one_out":
            yield from super().group_problems()
        elif self.credit == "prefix":
            yield at("method.credit", "'prefix' compares within groups, and method.baseline 'batch' does not.")
        elif self.max_at_k > 1:
            yield at("method.max_at_k", "above 1 compares within groups, and method.baseline 'batch' does not.")
        elif self.scale_rewards == "group":
            yield at("method.scale_rewards", "'group' compares within groups, and method.baseline 'batch' does not.")
        elif self.num_generations == 1 and self.max_sampling_attempts is not None:
            yield at(
                "method.max_sampling_attempts",
                f"{self.max_sampling_attempts} would leave out all groups, as method.num_generations is 1; use null.",
            )
