"""REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740), and REINFORCE++
(Hu 2025, arXiv:2501.03262).

A response's advantage is its score minus the mean score of the other responses to the same prompt. REINFORCE++ compares
with all responses of the round instead, and subtracts from each token the KL penalties of that token and those after
it. Documented in docs/algorithms/rloo.md.
"""

from __future__ import annotations

from torch import Tensor

from trlx_like.config.methods.rloo import RLOOConfig
from trlx_like.functional.group_advantages import best_of, group_centered
from trlx_like.functional.returns import discounted_returns
from trlx_like.trainers.groups import GroupExperience, GroupTrainer


class RLOOTrainer(GroupTrainer):
    """Train with RLOO, or with REINFORCE++ if `baseline` is "batch"."""

    method_class = RLOOConfig
    method: RLOOConfig

    def advantages(self, batch: GroupExperience, scores: Tensor, mask: Tensor) -> Tensor:
        if self.method.baseline == "batch":
            return self.whitened_returns(batch, self.scaled(scores, mask)[mask])
        values, advantages = best_of(self.penalized(batch, scores, mask), mask, self.max_at_k)
        return self.of_tokens(batch, group_centered(values, mask), advantages, mask)

    def whitened_returns(self, batch: GroupExperience, scores: Tensor) -> Tensor:
        """Compute the advantages of REINFORCE++, whitened over all tokens of the round.

        Args:
            batch: The responses.
            scores: Score of each response, as `scale_rewards` scales it. [B]

        Returns:
            For each token the score minus the KL penalties of the token and those after it, whitened. [B, R]
        """
        rewards = -self.penalty(batch)
        last = batch.mask.sum(dim=1, keepdim=True).clamp(min=1) - 1
        rewards = rewards.scatter_add(1, last, scores[:, None].to(rewards))
        return self.whitened(discounted_returns(rewards, batch.mask, 1.0), batch.mask)
