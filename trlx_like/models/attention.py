"""The attention that models take in our passes: torch's kernel, for those pairs of tokens alone that are needed.

In packed rows each response attends to its prompt and to itself, see `pieces`. In the last block those tokens attend
whose states are read, see `last_states`. Left out: GPUs, and gradient checkpointing, which would compute blocks again
outside of the `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trlx_like.models.pieces import attend_in_pieces, in_order, pairs_in_pieces

NAME = "trlx_like_needed"
WORTH = 3 / 4
"""The largest part of the pairs of tokens in attention that is worth computing alone."""


@dataclass(frozen=True)
class Attending:
    """Tell which tokens of a batch attend in a block.

    Attributes:
        places: Their places among all of the batch, each once. [S] int64
        fill: What stands for the attended values of the others.
        then: Is called with a module in which these tokens have attended alone.
    """

    places: Tensor
    fill: float
    then: Callable[[nn.Module], None]


_ATTENDING: dict[nn.Module, Attending] = {}
"""Which tokens attend, by each module of a block."""


@contextmanager
def attending_at(model: Any, block: nn.Module, which: Attending) -> Iterator[None]:
    """Let some tokens of a block attend alone in a `with` block, if the model attends with torch's kernel otherwise.

    Args:
        model: The model, which does not recompute its blocks.
        block: The block. All tokens attend in its parts that have hooks, and where many are wanted.
        which: The tokens.
    """
    config = model.config.get_text_config(decoder=True)
    own = config._attn_implementation == "sdpa" and model._supports_attention_backend
    if not own or which.places.device.type != "cpu":
        yield
        return
    parts = dict.fromkeys(block.modules(), which)
    _ATTENDING.update(parts)
    try:
        with attending(config, NAME):
            yield
    finally:
        for part in parts:
            del _ATTENDING[part]


@contextmanager
def piece_by_piece(model: Any, mask: Tensor | None) -> Iterator[None]:
    """Let a model attend piece by piece in a `with` block, if it attends with torch's kernel otherwise.

    Args:
        model: The model.
        mask: The mask that it gets; without pieces, nothing is changed.
    """
    config = None if pairs_in_pieces(mask) is None else model.config.get_text_config(decoder=True)
    if config is None or config._attn_implementation != "sdpa" or recomputes(model):
        yield
        return
    with attending(config, NAME):
        yield


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Let the model of a configuration, and none of its parts, take an attention of transformers in a `with` block."""
    before = config._attn_implementation
    config._attn_implementation = {"": name}  # a name alone would stay in the configurations of its parts
    try:
        yield
    finally:
        config._attn_implementation = {"": before}


def recomputes(model: nn.Module) -> bool:
    """Return whether a backward pass computes parts of a model again (gradient checkpointing)."""
    # `vars`, because `getattr` is slow for an attribute that a module does not have.
    parts = model.modules()
    return any(vars(part).get("gradient_checkpointing") or isinstance(part, CheckpointWrapper) for part in parts)


def has_hooks(module: nn.Module) -> bool:
    """Return whether there is a hook on a module itself, which may look at what all tokens enter or leave as."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Compute softmax(q k^T scale) v over visible tokens. The arguments are those of each attention of transformers.

    Args:
        module: The layer.
        query: The states that attend. [N, heads, W, width]
        key: The keys; each serves several heads if there are fewer of them. [N, groups, T, width]
        value: The values. [N, groups, T, width]
        attention_mask: True on visible tokens, or what is added to scores [N or 1, heads or 1, W, T]; None: with W = T
            those before a token and itself. One of `set_pieces` has zeros as the values of tokens of no sample.
        given: The scale as `scaling`, and further options.

    Returns:
        The attended values [N, W, heads, width], and no weights.
    """
    which, made = _ATTENDING.get(module), None
    if given.get("position_bias") is None:
        if which is not None and not has_hooks(module):
            made = _attend_at(which, module, query, key, value, attention_mask, given)
        if made is None and attention_mask is not None and not given.get("dropout"):
            made = attend_in_pieces(query, key, value, attention_mask, given.get("scaling"))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **given) if made is None else (made, None)


def _attend_at(
    which: Attending,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: dict[str, Any],
) -> Tensor | None:
    """Let some tokens attend as in `attend`; return None where that is not worth it."""
    rows, heads, width, size = query.shape
    causal = mask is None and given.get("is_causal", getattr(module, "is_causal", True))
    row = which.places // width
    counts, tokens = row.bincount(minlength=rows), key.shape[2]
    most = int(counts.max())
    pairs = pairs_in_pieces(mask) or rows * width * (in_order(width) if causal else tokens)
    if not 0 < rows * most * tokens <= WORTH * pairs or (causal and tokens != width):
        return None
    # As many tokens in each row, so that some stand for nothing: the first one of the row.
    order = row.argsort(stable=True)
    before = counts.cumsum(0) - counts
    number = torch.empty_like(row)
    number[order] = torch.arange(len(row)) - before[row[order]]  # of each token in its row
    at = row * most + number
    taken = (torch.arange(rows) * width).repeat_interleave(most).index_copy(0, at, which.places)  # [rows * most]
    query = query.transpose(1, 2).reshape(rows * width, heads, size).index_select(0, taken)
    if causal:
        mask = (torch.arange(width) <= (taken % width)[:, None]).view(rows, 1, most, width)
    elif mask is not None:
        of_row = taken // width if len(mask) > 1 else torch.zeros_like(taken)
        mask = mask[of_row, :, taken % width].unflatten(0, (rows, most)).transpose(1, 2)
    query = query.view(rows, most, heads, size).transpose(1, 2)
    made: Tensor = sdpa_attention_forward(module, query, key, value, mask, **given)[0].flatten(0, 1)
    which.then(module)
    filled = made.new_full((rows * width, *made.shape[1:]), which.fill)
    return filled.index_copy_(0, which.places, made.index_select(0, at)).view(rows, width, heads, -1)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
