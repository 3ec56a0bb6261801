"""Division of scores by their standard deviation, so that rewards of any magnitude give advantages of the same size."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trlx_like.functional.moments import RunningMoments


class RewardScaling:
    """Scale scores by a standard deviation: that of all scores so far, or a fixed one.

    Source: trlX 0.7 `trainer/accelerate_ppo_trainer.py`, options `scale_reward`, `ref_mean`, `ref_std`.

    Args:
        kind: "running" (all scores so far), "ref" (a fixed reference) or None (no scaling).
        center: Also subtract the mean.
        ref_mean, ref_std: Mean and standard deviation of the reference; None: those of the first round.
    """

    def __init__(
        self, kind: Literal["running", "ref"] | None, *, center: bool, ref_mean: float | None, ref_std: float | None
    ) -> None:
        self.kind = kind
        self.center = center
        self.ref_mean, self.ref_std = ref_mean, ref_std
        self.moments = RunningMoments()

    def __call__(self, scores: Tensor, mask: Tensor, *, count: float, mean: float, m2: float, std: float) -> Tensor:
        """Scale a round's scores.

        Args:
            scores: Reward of each token. [B, R]
            mask: True on response tokens. [B, R] bool
            count, mean, m2, std: Statistics of the round's scores of whole responses, over all processes; m2 is the sum
                of squared distances from the mean.

        Returns:
            The scaled rewards [B, R]. The mean is subtracted at the last token of each response.
        """
        if self.kind is None:
            return scores
        if self.kind == "running":
            self.moments.update(count, mean, m2)
            mean, std = self.moments.mean, self.moments.std
        else:
            self.ref_mean = mean if self.ref_mean is None else self.ref_mean
            self.ref_std = std if self.ref_std is None else self.ref_std
            mean, std = self.ref_mean, self.ref_std or 1.0
        if self.center:
            last = mask.sum(dim=1, keepdim=True).clamp(min=1) - 1
            scores = scores.scatter_add(1, last, torch.full_like(last, -mean, dtype=scores.dtype))
        return scores / std

    def state_dict(self) -> dict[str, Any]:
        """Return the reference moments and the running moments of scores, for a checkpoint."""
        return {"ref_mean": self.ref_mean, "ref_std": self.ref_std, "moments": self.moments.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the moments that `state_dict` returned."""
        self.ref_mean, self.ref_std = state["ref_mean"], state["ref_std"]
        self.moments.load_state_dict(state["moments"])
