"""Options of Online DPO: those of TRL's OnlineDPOTrainer, the size of a round, and more than two responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trlx_like.config.method import DropoutMethodConfig, ReplayMethodConfig, Sections
from trlx_like.config.problems import Accepts, Problem, only
from trlx_like.config.resume import Applied, OfRollouts, OfRound

GEN_KWARGS = {"max_new_tokens": 64, "temperature": 0.9, "top_k": 0, "top_p": 1.0, "do_sample": True}
"""The defaults of TRL."""


class OnlineDPOConfig(DropoutMethodConfig, ReplayMethodConfig):
    """DPO on pairs of the policy's own responses, as a judge or a reward function prefers them (Guo et al. 2024)."""

    gen_kwargs: OfRollouts[dict[str, Any]] = GEN_KWARGS
    """Generation options for evaluation, such as max_new_tokens. A list of values is a sweep: each is evaluated."""
    beta: Applied[
        Annotated[
            float | list[float],
            only(lambda value: min(value if isinstance(value, list) else [value], default=0) > 0),
            Accepts("a number above 0, or a list of them"),
        ]
    ] = 0.1
    """Strength of the pull to the reference (tau in IPO). A list has a value for each pass over the prompts."""
    loss_type: Applied[Literal["sigmoid", "ipo"]] = "sigmoid"
    """Loss of a pair. Here ipo sums over tokens, as in its paper; ipo of DPOConfig takes the mean."""
    n_generations_per_prompt: OfRound[int] = Field(default=2, ge=2)
    """Number of responses to each prompt; the best and the worst become a pair."""
    num_prompts: OfRound[int | None] = Field(default=None, ge=1)
    """Number of prompts in each round, over all processes; null: `train.batch_size`, so that a round is one step."""
    chunk_size: Applied[int] = Field(default=64, ge=1)
    """Number of prompts to generate and judge responses for at once, per process."""
    missing_eos_penalty: Applied[float | None] = Field(default=None, ge=0)
    """Penalty subtracted from the score of a response that was cut at max_new_tokens; null: none."""

    @field_validator("gen_kwargs", "gen_experience_kwargs")
    @classmethod
    def _with_defaults(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add the length and temperature of the defaults where they are not given; the others have no effect."""
        return given and {**{name: GEN_KWARGS[name] for name in ("max_new_tokens", "temperature")}, **given}

    def beta_of(self, epoch: int) -> float:
        """Return beta for a pass over the prompts, counted from 0. After the end of a list its last value stays."""
        return self.beta[min(epoch, len(self.beta) - 1)] if isinstance(self.beta, list) else self.beta

    @property
    def group_size(self) -> int:
        return self.n_generations_per_prompt

    @property
    def measures_kl(self) -> bool:
        return True

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        return self.fewer_than_a_step("num_prompts", config)
