"""The last hidden states of a batch, of which the last block computes those alone that are read.

All tokens have to give keys and values to its attention. Nothing after them mixes tokens, so that the queries and the
feed-forward network, two thirds of the weights, are needed for what is read alone, and give the same up to rounding.
Whether that holds for a model is tested once, by `can_skip_unread`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from trlx_like.errors import ConfigError
from trlx_like.models.attention import Attending, attending_at, has_hooks, recomputes
from trlx_like.models.dropout import evaluating
from trlx_like.models.layout import base_model, blocks, is_encoder_decoder, run_base
from trlx_like.models.shared_prompts import SharedPrompts
from trlx_like.models.unread import lowest_blocks

WORTH = 15 / 16
"""The largest part of a batch's tokens that is worth computing alone."""


@dataclass
class Reading:
    """Tell how a model reads a batch.

    Attributes:
        inputs: The arguments of its forward pass, as `Completion.inputs` makes them.
        shared: The prompts to read once, with a model that `can_share`; None reads every row whole.
        places: The places of the tokens whose last hidden states are wanted, among the B T of all rows or, with shared
            prompts, among those of the U prompts; None: all. [S] int64
    """

    inputs: Mapping[str, Tensor]
    shared: SharedPrompts | None = None
    places: Tensor | None = None


Run = Callable[[PreTrainedModel, Mapping[str, Tensor]], tuple[Tensor, Any]]
"""A function like `run_base`."""


def last_states(lm: PreTrainedModel, reading: Reading, run: Run = run_base) -> Tensor:
    """Compute the last hidden states of a batch.

    Args:
        lm: The language model.
        reading: How it reads the batch.
        run: Runs the model, or its upper blocks from kept states. Prompts cannot be shared then.

    Returns:
        The states of all tokens [B, T, H]; with shared prompts those of the last prompt token and of the response
        [B, 1 + R, H]. They mean nothing at tokens that are not wanted.
    """
    inputs, shared = reading.inputs, reading.shared
    with read_at(lm, last_block(lm), reading.places):
        if shared is None:
            return run(lm, inputs)[0]
        base, cache, width = base_model(lm), DynamicCache(), shared.width
        prompts = {name: value[shared.first, :width] for name, value in inputs.items()}
        read: Tensor = base(**prompts, past_key_values=cache, use_cache=True).last_hidden_state
    for layer in cast("list[Any]", cache.layers):  # whose own method has a slow backward pass
        layer.keys, layer.values = (held.index_select(0, shared.of_row) for held in (layer.keys, layer.values))
    responses = {name: value[:, width:] for name, value in inputs.items()}
    responses["attention_mask"] = inputs["attention_mask"]  # of all keys
    written: Tensor = base(**responses, past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat([read[shared.of_row, -1:], written], dim=1)


def last_block(lm: PreTrainedModel) -> nn.Module | None:
    """Return the last of the blocks; None for a family whose blocks are not found."""
    try:
        return blocks(lm)[-1]
    except ConfigError:
        return None


@contextmanager
def read_at(model: Any, block: nn.Module | None, places: Tensor | None, fill: float = 0.0) -> Iterator[None]:
    """Let the last block compute the tokens that are read alone, in a `with` block.

    They alone go through its part `mlp`. On CPUs they alone attend too, if they are few enough, and go through what
    follows the attention in its module. A part computes all tokens if there is a hook on it, which may look at them.
    Every part does with gradient checkpointing, which would compute all of them after the `with` block.

    Args:
        model: The model, which runs once in the `with` block. It is one for which `can_skip_unread` is True.
        block: Its last block; None computes all tokens.
        places: The places of the tokens that are read, among all of a batch, each once; None: all. [S] int64
        fill: What stands for the results of the other tokens, whose last hidden states mean nothing.
    """
    if places is None or block is None or recomputes(model):
        yield
        return
    with ExitStack() as parts:

        def after(attention: nn.Module) -> None:
            for part in attention.children():
                parts.enter_context(_computing_at(part, places, fill))

        if isinstance(network := getattr(block, "mlp", None), nn.Module):
            parts.enter_context(_computing_at(network, places, fill))
        parts.enter_context(attending_at(model, block, Attending(places, fill, after)))
        yield


@contextmanager
def _computing_at(part: nn.Module, places: Tensor, fill: float) -> Iterator[None]:
    """Let a part of a block compute some tokens alone, in a `with` block. The arguments are those of `read_at`."""
    if "forward" in vars(part) or has_hooks(part) or next(part.parameters(), None) is None:
        yield
        return
    whole = part.forward

    def forward(states: Tensor, *others: Any, **options: Any) -> Any:
        count = states.shape[:-1].numel()
        if others or options or not 0 < len(places) <= WORTH * count:
            return whole(states, *others, **options)
        made = whole(states.flatten(0, -2).index_select(0, places)[None])
        filled = made.new_full((count, made.shape[-1]), fill)
        return filled.index_copy_(0, places, made[0]).view(*states.shape[:-1], -1)

    part.forward = forward
    try:
        yield
    finally:
        del part.forward


def can_skip_unread(lm: PreTrainedModel) -> bool:
    """Test whether the last block of a model may compute some tokens alone.

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
            with read_at(small, block, places, fill=torch.nan):
                found = run_base(small, {"input_ids": ids})[0].flatten(0, 1)
        read = torch.zeros(len(whole), dtype=torch.bool, device=lm.device).index_fill_(0, places, True)
        difference = (found - whole)[read].float().norm()
        close = difference < (1e-3 if lm.dtype.itemsize >= 4 else 2e-2) * whole[read].float().norm()
        return bool(close) and bool(found[~read].isnan().any(dim=-1).all())
    except Exception:  # code of a family that does not expect so few tokens may fail in any way
        return False
