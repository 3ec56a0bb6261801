"""Options of rejection-sampling fine-tuning: those of trlX, and the sizes of chunks and pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from trlx_like.config.auto import CountOrAuto, is_auto
from trlx_like.config.method import OnlineTextMethodConfig
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfRound, OfState


class RFTConfig(OnlineTextMethodConfig):
    """Fine-tune on the best of the model's own responses (rejection sampling, RAFT; Dong et al. 2023)."""

    exact_sampling: ClassVar[bool] = False

    n_generations_per_prompt: OfRound[CountOrAuto] = 32
    """Number of responses to each prompt, each time that the pool grows; auto: 512 / prompts, from 4 to 32."""
    n_improve_steps: OfRound[int] = Field(default=4, ge=1)
    """Number of rounds of training between two growths of the pool, each with a higher percentile."""
    start_percentile: Applied[float] = Field(default=0.7, ge=0, le=1)
    """Fraction of each prompt's responses, the worst, left out in the first round after the pool has grown."""
    end_percentile: Applied[float] = Field(default=0.95, ge=0, le=1)
    """Fraction left out that `start_percentile` rises towards over `n_improve_steps` rounds."""
    chunk_size: Applied[int] = Field(default=128, ge=1)
    """Number of responses to generate and score at once, per process."""
    pool_size: OfState[int | None] = Field(default=None, ge=1)
    """Number of newest responses to each prompt that the pool keeps; null: all, as in trlX."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.n_improve_steps > 1 and self.start_percentile > self.end_percentile:
            yield at(
                "method.start_percentile",
                f"{self.start_percentile} must be at most method.end_percentile ({self.end_percentile}).",
            )
        several = is_auto(self.n_generations_per_prompt) or self.n_generations_per_prompt > 1
        if several and self.experience_kwargs.get("do_sample") is False:
            name = "gen_kwargs" if self.gen_experience_kwargs is None else "gen_experience_kwargs"
            yield at(
                f"method.{name}.do_sample",
                f"false makes method.n_generations_per_prompt ({self.n_generations_per_prompt}) equal responses; "
                "use true.",
            )

    def acting(self) -> dict[str, bool]:
        return {"end_percentile": self.n_improve_steps > 1}
