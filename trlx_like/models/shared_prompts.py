"""Prompts that several rows of a batch share: a causal model reads each once, and the responses after its cache.

So do the pairs of DPO and the groups of GRPO, RLOO and Online DPO, with and without gradients. Scores and gradients
are those of whole rows, but for rounding. Left out: models that run from kept states or branch off below the top, and
gradient checkpointing, under which blocks take no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from trlx_like.data import Completion
from trlx_like.models.attention import recomputes
from trlx_like.models.dropout import has_dropout
from trlx_like.models.layout import rotates_by_length, takes

WORTH = 1 / 4
"""The least part of a batch's tokens that must be saved, because two passes are slower than one of as many tokens.

With 17 % of the tokens saved, a step of DPO takes as long as without; with 38 %, three quarters of the time.
"""


def why_no_cache(lm: PreTrainedModel) -> str | None:
    """Return in words why a model has no cache of the keys and values of each token alone; None if it has one."""
    if lm.config.is_encoder_decoder:
        return "an encoder, which reads the prompt"
    supported = vars(GenerationMixin)["_supports_default_dynamic_cache"]  # by name; classifiers lack it
    if not takes(lm, "past_key_values") or not supported.__func__(type(lm)):
        return "a model without a cache of keys and values"
    kinds = {type(layer) for layer in DynamicCache(config=lm.config.get_text_config(decoder=True)).layers}
    if not kinds or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return "a cache that holds more than the keys and values of each token"
    return None


def can_share(lm: PreTrainedModel) -> bool:
    """Return whether a model computes the same for a shared prompt as for each row alone."""
    return is_read_in_order(lm) and not recomputes(lm)


def is_read_in_order(lm: PreTrainedModel) -> bool:
    """Return whether what a model makes of a token depends on those before it alone, and not on how many follow."""
    return why_no_cache(lm) is None and not (rotates_by_length(lm) or has_dropout(lm) or lm.is_remote_code())


@dataclass
class SharedPrompts:
    """Tell which rows of a batch have the same prompt."""

    width: int  # P
    first: Tensor  # [U] int64, a row with each prompt
    of_row: Tensor  # [B] int64, the prompt of each row

    @property
    def ends(self) -> Tensor:
        """The places of the last tokens of the prompts, among the U P of all. [U] int64"""
        return torch.arange(1, len(self.first) + 1, device=self.first.device) * self.width - 1

    @classmethod
    def of(cls, batch: Completion, of_row: Tensor) -> SharedPrompts | None:
        """Find the prompts that are worth sharing; None if too few rows share one.

        Args:
            batch: The batch.
            of_row: What `same_prompts` returns.
        """
        rows, width = batch.prompt.shape
        different = int(of_row.max()) + 1
        if (rows - different) * width < WORTH * rows * (width + batch.response.shape[1]):
            return None
        index = torch.arange(rows, device=of_row.device)
        return cls(width, of_row.new_zeros(different).scatter_(0, of_row, index), of_row)


def same_prompts(batch: Completion) -> Tensor:
    """Number the different prompts of a batch, and return the number of each row's prompt. [B] int64"""
    numbers: Tensor = torch.cat([batch.prompt, batch.prompt_mask], dim=1).unique(dim=0, return_inverse=True)[1]
    return numbers
