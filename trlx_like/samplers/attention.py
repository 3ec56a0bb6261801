"""Attention of one new token per row, which two products and a softmax compute in less time than torch's kernel.

That kernel works on blocks of many tokens, and reads keys and values that heads share once for each of them. The keys
and values of a prompt that several rows continue are read once for all of them (Hydragen, Juravsky et al. 2024,
arXiv:2402.05099). Left out: GPUs, number formats of 16 bits, and families that do not take their attention from the
interface of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trlx_like.models.attention import attending
from trlx_like.samplers.cache import RowCache, SharedPrefix

NAME = "trlx_like_one_token"
_CACHE: ContextVar[RowCache | None] = ContextVar("cache", default=None)
"""What the rows that are decoded have read, from which `attend` learns which of them share a prompt."""
_NOTHING = torch.zeros(1)
"""What a product is added to, times 0: torch multiplies by the scale in the product itself then."""


@contextmanager
def attention_for_decoding(lm: PreTrainedModel, cache: RowCache) -> Iterator[None]:
    """Let a model attend with `attend` for the duration of a block, if it attends with torch's kernel otherwise.

    Args:
        lm: The language model.
        cache: What its rows have read.
    """
    config: Any = lm.config.get_text_config(decoder=True)
    usual = config._attn_implementation
    own = usual == "sdpa" and lm._supports_attention_backend and lm.device.type == "cpu"
    given = _CACHE.set(cache)
    try:
        with attending(config, NAME if own else usual):
            yield
    finally:
        _CACHE.reset(given)


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
    masked = attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1)
    if query.shape[2] > 1 or query.dtype != torch.float32 or masked or given.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    cache = _CACHE.get()
    common = None if cache is None else cache.common
    if common is not None and key.shape[2] <= common.width:
        common = None  # these are the keys of prompts that are read
    return attend_to_all(query, key, value, attention_mask, given.get("scaling"), common), None


def attend_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    common: SharedPrefix | None = None,
) -> Tensor:
    """Do what `attend` does for one new token per row, whose keys and values may have columns in common."""
    rows, heads, _, width = query.shape
    scale = width**-0.5 if scale is None else scale
    query = query.reshape(rows, key.shape[1], -1, width)  # [n, groups, heads / groups, width]
    apart = 0 if common is None else common.width  # the first column that each row reads by itself
    own_key, own_value = ((states[:, :, apart:] if apart else states).flatten(0, 1) for states in (key, value))
    weights = torch.baddbmm(_NOTHING, query.flatten(0, 1), own_key.transpose(1, 2), beta=0, alpha=scale)
    if common is not None:
        shared = key[common.firsts, :, :apart].flatten(0, 1).transpose(1, 2)
        of_common = _by_prompt(query * scale, shared, common)
        weights = torch.cat([of_common.flatten(0, 1), weights], dim=-1)
    if mask is not None:
        weights = weights.unflatten(0, (rows, -1)).where(mask, -torch.inf).flatten(0, 1)
    weights = weights.softmax(dim=-1)  # [n x groups, heads / groups, T]
    attended = torch.bmm(weights[..., apart:] if apart else weights, own_value)
    if common is not None:
        of_common = weights[..., :apart].unflatten(0, (rows, -1))
        attended += _by_prompt(of_common, value[common.firsts, :, :apart].flatten(0, 1), common).flatten(0, 1)
    return attended.view(rows, 1, heads, -1)


def _by_prompt(states: Tensor, matrices: Tensor, common: SharedPrefix) -> Tensor:
    """Multiply states of rows [n, groups, k, a] by matrices of their G prompts [G x groups, a, b]. [n, groups, k, b]"""
    _, groups, each, ins = states.shape
    placed = states
    if common.places is not None:
        placed = states.new_zeros(len(matrices) // groups * common.rows_per_prompt, *states.shape[1:])
        placed[common.places] = states
    placed = placed.view(-1, common.rows_per_prompt, groups, each, ins).transpose(1, 2)  # [G, groups, most, k, a]
    made = placed.reshape(len(matrices), -1, ins) @ matrices  # [G x groups, most x k, b]
    made = made.view(-1, groups, common.rows_per_prompt, each, made.shape[-1]).transpose(1, 2).flatten(0, 1)
    return made if common.places is None else made[common.places]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
