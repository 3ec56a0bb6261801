"""Options of reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trlx_like.config.method import MethodConfig


class RewardConfig(MethodConfig):
    """A reward model from pairs of answers of which one is preferred."""

    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which pulls their level to zero; 0.01 is usual."""
    max_length: int | None = Field(None, ge=2)
    """Tokens of a prompt and an answer together; null: `train.seq_length`."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens of a prompt, cut on `tokenizer.truncation_side`; null: as long as it fits."""
    too_long: Literal["drop", "truncate"] = "drop"
    """What happens to pairs that are longer than `max_length`."""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """With `too_long: truncate`: cut the beginning of the prompt, or the end of the answer."""
    disable_dropout: bool = True
    """Train without dropout."""
