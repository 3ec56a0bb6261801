"""Options of on-policy distillation: the divergence from the teacher and the size of a round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from trlx_like.config.method import DropoutMethodConfig, OnlineTextMethodConfig, Sections
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfRound


class DistillConfig(DropoutMethodConfig, OnlineTextMethodConfig):
    """Distil a teacher into the policy on the policy's own responses (GKD with lambda 1, Agarwal et al. 2024)."""

    exact_sampling: ClassVar[bool] = False

    divergence: Applied[Literal["reverse_kl", "forward_kl", "jsd"]] = "reverse_kl"
    """Loss of a token. reverse_kl: KL(policy || teacher); forward_kl: KL(teacher || policy); jsd: between the two."""
    beta: Applied[float] = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture that jsd compares both with; near 0 it acts like forward_kl."""
    loss_temperature: Applied[float] = Field(default=1.0, gt=0)
    """Divides the logits of policy and teacher in the loss. Responses are sampled at `gen_kwargs.temperature`."""
    num_rollouts: OfRound[int | None] = Field(default=None, ge=1)
    """Number of responses in each round, over all processes; null: `train.batch_size`, so that a round is one step."""
    chunk_size: Applied[int] = Field(default=64, ge=1)
    """Number of responses to generate at once, per process."""

    def acting(self) -> dict[str, bool]:
        return {**super().acting(), "beta": self.divergence == "jsd"}

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        if config.model.ref_model_path is None:
            words = "is null; name the teacher, a model with the same tokenizer."
            yield at("model.ref_model_path", words)
        yield from self.fewer_than_a_step("num_rollouts", config)
