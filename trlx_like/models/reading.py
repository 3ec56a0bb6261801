"""The last feed-forward network of a model computes only the tokens whose last hidden states are read.

What comes before it mixes tokens, and what follows does not, so that what is read is the same up to rounding. It has
two thirds of the weights of the last block. Whether that holds for a model is tested once, by `picks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.models.dropout import evaluating
from trlx_like.models.layout import blocks, is_encoder_decoder, run_base
from trlx_like.models.pieces import recomputes
from trlx_like.models.unread import lowest_blocks

WORTH = 15 / 16
"""The largest part of a batch's tokens that is worth picking out of it."""


def last_block(lm: PreTrainedModel) -> nn.Module | None:
    """Return the last of the blocks; None for a family whose blocks are not found."""
    try:
        return blocks(lm)[-1]
    except ConfigError:
        return None


@contextmanager
def read_at(model: nn.Module, block: nn.Module | None, places: Tensor | None, unread: float = 0.0) -> Iterator[None]:
    """Let the part `mlp` of the last block compute the tokens that are read alone, in a `with` block.

    It computes all of them if there is a hook on it, which may look at what it computes, and with gradient
    checkpointing, which would compute all of them after the `with` block.

    Args:
        model: The model, which runs once in the `with` block. It is one for which `picks` is True.
        block: Its last block; None computes all tokens.
        places: The places of the tokens that are read, among all of a batch, each once; None: all. [S] int64
        unread: What stands for the results of the other tokens, whose last hidden states mean nothing.
    """
    part = getattr(block, "mlp", None)
    if places is None or part is None or "forward" in vars(part) or recomputes(model):
        yield
        return
    whole = part.forward
    watched = bool(part._forward_hooks or part._forward_pre_hooks)

    def forward(states: Tensor, *others: Any, **options: Any) -> Any:
        count = states.shape[:-1].numel()
        if watched or others or options or not 0 < len(places) <= WORTH * count:
            return whole(states, *others, **options)
        made = whole(states.flatten(0, -2).index_select(0, places)[None])
        filled = made.new_full((count, made.shape[-1]), unread)
        return filled.index_copy_(0, places, made[0]).view(*states.shape[:-1], -1)

    part.forward = forward
    try:
        yield
    finally:
        del part.forward


def picks(lm: PreTrainedModel) -> bool:
    """Test whether the last feed-forward network of a model may compute some tokens alone.

    NaN stands for the others, so that whatever reads them is found out: a convolution that follows, a network that two
    blocks share or that runs twice, and tokens in another order.

    Args:
        lm: A language model, or a classifier that reads a sequence at its end.
    """
    if is_encoder_decoder(lm) or lm.is_remote_code():
        return False
    try:
        small = lowest_blocks(lm, 2)
        block = last_block(small)
        if block is None or type(getattr(last_block(lm), "mlp", None)) is not type(getattr(block, "mlp", None)):
            return False
        ids = torch.arange(12, device=lm.device).view(2, 6) % lm.config.get_text_config().vocab_size
        places = torch.tensor([2, 9, 11], device=lm.device)
        with torch.no_grad(), evaluating(small):
            whole = run_base(small, {"input_ids": ids})[0].flatten(0, 1)
            with read_at(small, block, places, unread=torch.nan):
                found = run_base(small, {"input_ids": ids})[0].flatten(0, 1)
        read = torch.zeros(len(whole), dtype=torch.bool, device=lm.device).index_fill_(0, places, True)
        difference = (found - whole)[read].float().norm()
        close = difference < (1e-3 if lm.dtype.itemsize >= 4 else 2e-2) * whole[read].float().norm()
        return bool(close) and bool(found[~read].isnan().any(dim=-1).all())
    except Exception:  # code of a family that does not expect so few tokens may fail in any way
        return False
