"""Options of reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trlx_like.config.method import MethodConfig


class RewardConfig(MethodConfig):
    """A reward model from pairs of answers of which one is preferred."""

    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which pulls their level to zero; 0.01 is usual."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Tokens of a prompt, at most; null: `train.seq_length` alone limits it."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What happens to a pair longer than `train.seq_length`."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """What stays of a pair that is cut: the ends of prompt and answers, where the reward is read, or the start."""
    disable_dropout: bool = True
    """Train without dropout."""
