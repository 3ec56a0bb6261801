"""What GRPO and RLOO have in common: several responses to each prompt, and a clipped loss on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from trlx_like.config.generation import longest_response
from trlx_like.config.method import OnlineTextMethodConfig
from trlx_like.config.problems import Problem


class GroupMethodConfig(OnlineTextMethodConfig):
    """Policy gradients with the other responses to a prompt in the place of a value function."""

    num_generations: int = Field(default=8, ge=1)
    """Responses to each prompt: a group."""
    num_prompts: int = Field(default=16, ge=1)
    """Prompts of a round, over all processes."""
    num_iterations: int = Field(default=1, ge=1)
    """Passes over the responses of a round."""
    chunk_size: int = Field(default=16, ge=1)
    """Prompts whose responses are generated and scored at once, per process."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """What counts the same: every token ("dapo"), every response ("grpo"), or a response by its length ("dr_grpo")."""
    epsilon: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped below at 1 - this."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """The probability ratio is clipped above at 1 + this; null: as `epsilon`."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What has a probability ratio: each token, or a response, as the geometric mean of those of its tokens (GSPO)."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference; 0: none, and no reference is made."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL acts: on each token's loss (the estimate k3), or subtracted from the scores (k1)."""
    ent_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, weighted over tokens as the loss is."""

    max_sampling_attempts: int | None = Field(default=None, ge=1)
    """Leave out groups of equal scores, drawing prompts up to this many times a round instead; null: keep them."""
    soft_punish_cache: int | None = Field(default=None, ge=1)
    """Tokens before `max_new_tokens` over which a growing penalty, up to 1, is taken from a score; null: none."""
    mask_truncated_completions: bool = False
    """Leave out responses that do not end by themselves. They still count in the baseline of their group."""

    @property
    def max_new_tokens(self) -> int:
        """Of the text that is trained on."""
        return longest_response(self.experience_kwargs)

    def conflicts(self) -> Iterator[Problem]:
        found = list(super().conflicts())
        yield from found
        if found:
            return
        if self.soft_punish_cache is not None and self.soft_punish_cache > self.max_new_tokens:
            yield _problem("soft_punish_cache", f"{self.soft_punish_cache} is above max_new_tokens.")
        yield from self.group_problems()

    def group_problems(self) -> Iterator[Problem]:
        """Why a group of this size cannot be compared."""
        if self.num_generations < 2:
            yield _problem("num_generations", "1 leaves nothing to compare a response with; use 2 or more.")

    def inert(self) -> list[str]:
        return ["kl_in"] if not self.beta and self.changed("kl_in") else []


def _problem(name: str, text: Any) -> Problem:
    return Problem(("method", name), text)
