"""Options of Online DPO: those of TRL's OnlineDPOTrainer, the size of a round, and more than two responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trlx_like.config.method import OnlineTextMethodConfig, Sections
from trlx_like.config.problems import Problem, Says


def _betas(value: float | list[float]) -> float | list[float]:
    values = value if isinstance(value, list) else [value]
    if not values or min(values) <= 0:
        raise ValueError
    return value


def default_gen_kwargs() -> dict[str, Any]:
    """TRL's."""
    return {"max_new_tokens": 64, "temperature": 0.9, "top_k": 0, "top_p": 1.0, "do_sample": True}


class OnlineDPOConfig(OnlineTextMethodConfig):
    """DPO on pairs of the policy's own responses, as a judge or a reward function prefers them (Guo et al. 2024)."""

    gen_kwargs: dict[str, Any] = Field(default_factory=default_gen_kwargs)
    """Options of `generate` for evaluation; a list of values for an option is a sweep over it."""
    beta: Annotated[
        float | list[float],
        AfterValidator(_betas),
        Says("a number above 0, or a list of them"),
    ] = 0.1
    """How strongly the policy is held to the reference; IPO's tau. A list: one for each pass over the prompts."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of a pair. ipo is on sums over tokens, as in its paper; that of DPOConfig is on means."""
    n_generations_per_prompt: int = Field(default=2, ge=2)
    """Responses made to each prompt, of which the best and the worst are a pair."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of a round, over all processes; null: `train.batch_size`, so that a round is one step."""
    chunk_size: int = Field(default=64, ge=1)
    """Prompts whose responses are generated and judged at once, per process."""
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    """Taken off the score of a response that does not end by itself; null: nothing."""
    disable_dropout: bool = True
    """Train without dropout."""

    def beta_of(self, epoch: int) -> float:
        """beta in a pass over the prompts, counted from 0. The last of a list stays."""
        return self.beta[min(epoch, len(self.beta) - 1)] if isinstance(self.beta, list) else self.beta

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        size = config.train.batch_size
        if self.num_prompts is not None and self.num_prompts < size:
            yield Problem(
                ("method", "num_prompts"),
                f"{self.num_prompts} is less than a step's train.batch_size ({size}); use at least that many, or null.",
            )
