"""Attention of one new token per row, which two products and a softmax compute in less time than torch's kernel.

That kernel works on blocks of many tokens, and reads keys and values that heads share once for each of them. Left out:
GPUs, number formats of 16 bits, and families that do not take their attention from the interface of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "trlx_like_one_token"
LEAST = 8
"""The least rows for which it is faster, because it starts more operations."""


@contextmanager
def attention_for_decoding(lm: PreTrainedModel, rows: int) -> Iterator[None]:
    """Let a model attend with `attend` for the duration of a block, if it attends with torch's kernel otherwise.

    Args:
        lm: The language model.
        rows: The rows of a batch.
    """
    before = lm.config._attn_implementation
    if before == "sdpa" and lm._supports_attention_backend and lm.device.type == "cpu" and rows >= LEAST:
        lm.config._attn_implementation = NAME
    try:
        yield
    finally:
        lm.config._attn_implementation = before


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Compute softmax(q k^T scale) v over visible tokens. The arguments are those of each attention of transformers.

    Args:
        module: The layer.
        query: The states that attend. [n, heads, t, width]
        key: The keys; each serves several heads if there are fewer of them. [n, groups, T, width]
        value: The values. [n, groups, T, width]
        attention_mask: True on visible tokens [n, 1, t, T] bool; None if all are.
        given: The scale as `scaling`, and further options.

    Returns:
        The attended values [n, t, heads, width], and no weights.
    """
    rows, heads, count, width = query.shape
    masked = attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1)
    if count > 1 or query.dtype != torch.float32 or masked or given.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    scale = given.get("scaling")
    query = (query * (width**-0.5 if scale is None else scale)).reshape(rows, key.shape[1], -1, width)
    weights = query @ key.transpose(2, 3)  # [n, groups, heads / groups, T]
    if attention_mask is not None:
        weights = weights.where(attention_mask, -torch.inf)
    return (weights.softmax(dim=-1) @ value).view(rows, 1, heads, -1), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
