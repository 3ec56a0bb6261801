"""What GRPO and RLOO have in common: several responses to each prompt, and a clipped loss on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from trlx_like.config.generation import longest_response
from trlx_like.config.method import PolicyGradientMethodConfig
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfReference, OfRollouts, OfRound


class GroupMethodConfig(PolicyGradientMethodConfig):
    """Options of policy gradients that compare the responses to a prompt and need no value function."""

    num_generations: OfRound[int] = Field(default=8, ge=1)
    """Number of responses to each prompt, which form a group."""
    num_prompts: OfRound[int] = Field(default=16, ge=1)
    """Number of prompts in each round, over all processes."""
    num_iterations: OfRound[int] = Field(default=1, ge=1)
    """Number of passes over the responses of a round."""
    chunk_size: Applied[int] = Field(default=16, ge=1)
    """Number of prompts to generate and score responses for at once, per process."""

    loss_type: Applied[Literal["dapo", "grpo", "dr_grpo"]] = "dapo"
    """What the loss averages over: tokens (dapo), responses (grpo), or tokens over a constant length (dr_grpo)."""
    epsilon: Applied[float] = Field(default=0.2, gt=0)
    """Distance below 1 at which the probability ratio is clipped."""
    epsilon_high: Applied[float | None] = Field(default=None, gt=0)
    """Distance above 1 at which the probability ratio is clipped; null: the same as `epsilon`."""
    importance_sampling_level: Applied[Literal["token", "sequence"]] = "token"
    """Probability ratio of each token, or of each sequence as the geometric mean over its tokens (GSPO)."""
    beta: OfReference[float] = Field(default=0.0, ge=0)
    """Weight of the KL to the reference; 0: no KL, and no reference model is made."""
    kl_in: OfRollouts[Literal["loss", "reward"]] = "loss"
    """Where the KL acts: added to each token's loss (estimator k3), or subtracted from the scores (k1)."""
    scale_rewards: Applied[Literal["group", "batch", "none"]] = "none"
    """Divide scores by their standard deviation in the group or in the round (batch) before a KL is subtracted."""
    credit: Applied[Literal["response", "prefix"]] = "response"
    """Compare a token with the whole group, or with the responses that share the tokens before it (prefix, TEMPO)."""
    max_at_k: Applied[int] = Field(default=1, ge=1)
    """Maximise the expected best score of this many responses to a prompt (PKPO), to explore; 1: the expected score."""
    max_at_k_steps: Applied[int | None] = Field(default=None, ge=1)
    """Number of first steps over which `max_at_k` falls to 1 linearly; null: it stays."""
    ent_coef: Applied[float] = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, which averages over tokens as the loss does."""

    max_sampling_attempts: Applied[int | None] = Field(default=None, ge=1)
    """Replace groups of equal scores by drawing prompts up to this many times a round; null: keep such groups."""
    soft_punish_cache: Applied[int | None] = Field(default=None, ge=1)
    """Number of last tokens before `max_new_tokens` over which a length penalty grows from 0 to 1; null: none."""
    mask_truncated_completions: Applied[bool] = False
    """Do not train on responses that were cut at `max_new_tokens`. They still count in their group's baseline."""

    @property
    def max_new_tokens(self) -> int:
        """Return the `max_new_tokens` of rollouts."""
        return longest_response(self.experience_kwargs)

    @property
    def group_size(self) -> int:
        return self.num_generations

    @property
    def measures_kl(self) -> bool:
        return self.beta > 0

    def conflicts(self) -> Iterator[Problem]:
        found = list(super().conflicts())
        yield from found
        if found:
            return
        if self.soft_punish_cache is not None and self.soft_punish_cache > self.max_new_tokens:
            yield at("method.soft_punish_cache", f"{self.soft_punish_cache} is above max_new_tokens.")
        yield from self.group_problems()

    def group_problems(self) -> Iterator[Problem]:
        """Yield why a group of this size cannot be compared."""
        if self.num_generations < 2:
            yield at("method.num_generations", "1 leaves nothing to compare a response with; use 2 or more.")
        elif self.max_at_k >= self.num_generations:
            yield at(
                "method.max_at_k",
                f"{self.max_at_k} is compared with as many other responses; method.num_generations "
                f"({self.num_generations}) must be above it.",
            )

    def acting(self) -> dict[str, bool]:
        return {**super().acting(), "kl_in": self.beta > 0, "max_at_k_steps": self.max_at_k > 1}
