"""Prompts and responses as token ids: what a sampler makes and a policy scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trlx_like.data.experience import Experience, padded


@dataclass
class Completion(Experience):
    """Token ids of prompts and of what follows them. Prompts end and responses begin at the same column.

    The ids are those that were sampled (or tokenised once); they are never made again from text.
    """

    prompt: Tensor = padded("left", mask="prompt_mask")  # [B, P] int64, P >= 1
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")  # [B, P] bool
    response: Tensor = padded()  # [B, R] int64
    mask: Tensor = padded(value=False)  # [B, R] bool, True on real response tokens; the first EOS is one

    @property
    def scored(self) -> Tensor:
        """Which response tokens a policy scores. [B, R] bool"""
        return self.mask

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of a causal language model. Positions count real tokens, so padding shifts nothing."""
        attention_mask = torch.cat([self.prompt_mask, self.mask], dim=1)  # [B, P + R]
        return {
            "input_ids": torch.cat([self.prompt, self.response], dim=1),
            "attention_mask": attention_mask.long(),
            "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
        }

    def previous(self) -> Tensor:
        """The token before each response token. [B, R]"""
        return torch.cat([self.prompt[:, -1:], self.response[:, :-1]], dim=1)
