"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

A response's advantage is its score minus the mean score of the responses to the same prompt, divided by their standard
deviation. Documented in docs/algorithms/grpo.md.
"""

from __future__ import annotations

from torch import Tensor

from trlx_like.config.methods.grpo import GRPOConfig
from trlx_like.functional.group_advantages import best_of, group_centered
from trlx_like.trainers.groups import GroupExperience, GroupTrainer


class GRPOTrainer(GroupTrainer):
    """Train with GRPO: a token has the advantage of its response, or one of its own with `credit: prefix`."""

    method_class = GRPOConfig
    method: GRPOConfig

    def advantages(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        values, _ = best_of(self.penalized(batch, scores, mask), mask, self.max_at_k)
        compared = group_centered(values, mask)  # [P, G]
        return self.of_tokens(batch, compared, compared, mask)
