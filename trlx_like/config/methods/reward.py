"""Options of reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trlx_like.config.method import DropoutMethodConfig
from trlx_like.config.resume import Applied, OfData


class RewardConfig(DropoutMethodConfig):
    """Train a reward model on pairs of answers, of which one is preferred."""

    center_rewards_coefficient: Applied[float] = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which keeps rewards around zero; 0.01 is usual."""
    max_prompt_length: OfData[int | None] = Field(default=None, ge=1)
    """Maximum number of tokens of a prompt; null: limited by `train.seq_length` alone."""
    too_long: OfData[Literal["truncate", "drop"]] = "drop"
    """What to do with a pair that is longer than `train.seq_length`."""
    truncation_mode: OfData[Literal["keep_start", "keep_end"]] = "keep_end"
    """What to keep of a pair that is cut: the end, where the reward is read, or the start."""
