"""The frozen blocks of a model: what they compute is kept with a sample, and only the blocks above run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trlx_like.models.dropout import evaluating
from trlx_like.models.layout import (
    BlockInputs,
    base_model,
    blocks,
    embedding_width,
    is_encoder_decoder,
    padded_probe,
    probe,
    recorded,
    replaced,
    rotates_by_length,
    run_base,
)
from trlx_like.models.top_blocks import PassThrough, reads_below
from trlx_like.models.unread import lowest_blocks


class _Entry(PassThrough):
    """Replaces the highest frozen block, and returns the states that were kept."""

    states: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the kept states in place of those that come from below."""
        return super().forward(self.states)


class Trunk:
    """Runs a causal language model from the states that enter one of its blocks.

    The family's own forward runs on a shallow copy of the model, which shares all parameters. Its lower blocks pass
    their input through, and the last of them returns the kept states. So masks, positions and rotary embeddings are the
    family's own.

    Args:
        lm: The language model. It is not changed.
        lowest: The number of the lowest block that runs, at least 1.
    """

    def __init__(self, lm: PreTrainedModel, lowest: int) -> None:
        with torch.no_grad(), recorded(blocks(lm)[0]) as record:
            run_base(lm, probe(lm))
        self.lm, self.lowest = lm, lowest
        base = base_model(lm)
        self.embedding_width = embedding_width(base.get_input_embeddings())  # type: ignore[operator]
        self.entry = _Entry(blocks(lm)[lowest - 1], record["values"])
        for block in blocks(lm)[: lowest - 1]:
            base = replaced(base, block, PassThrough(block, record["values"]))
        self.base = replaced(base, blocks(lm)[lowest - 1], self.entry)

    def __call__(
        self, states: Tensor, inputs: Mapping[str, Tensor], branches: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, BlockInputs]]:
        """Run the blocks from the lowest one on, and what follows them.

        Args:
            states: What enters the lowest block; padding may be anything finite. [B, T, H]
            inputs: The inputs of the model, as for `run_base`.
            branches: As for `run_base`.

        Returns:
            As `run_base`.
        """
        ignored = states.new_zeros(1).expand(*states.shape[:2], self.embedding_width)
        given = {name: value for name, value in inputs.items() if name != "input_ids"}
        self.entry.states = states
        try:
            hidden, entering = run_base(self.lm, {**given, "inputs_embeds": ignored}, branches, base=self.base)
        finally:
            del self.entry.states
        return hidden, {at: replace(found, inputs=inputs) for at, found in entering.items()}

    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute what enters the lowest block that runs. [B, T, H]"""
        return run_base(self.lm, inputs, [self.lowest])[1][self.lowest].hidden

    def from_states(self, states: Tensor) -> Callable[..., tuple[Tensor, dict[int, BlockInputs]]]:
        """Return a function like `run_base` that runs the blocks above kept states [B, T, H]."""
        return lambda lm, inputs, branches=(): self(states, inputs, branches)

    def agrees(self) -> bool:
        """Test whether the model computes the same from kept states: a block could read more than those."""
        inputs = padded_probe(self.lm)
        mask = inputs["attention_mask"]
        with torch.no_grad(), evaluating(self.lm):
            whole, entering = run_base(self.lm, inputs, [self.lowest])
            states = entering[self.lowest].hidden * mask[:, :, None]
            above = self(states, inputs)[0]
        difference = (whole - above)[mask.bool()].float().norm()
        # Rounding is far below this bound, and what a block misses is far above, even with random weights.
        return bool(difference < 1e-3 * whole.float().norm())


def lowest_trained(lm: PreTrainedModel) -> int:
    """Return the number of the lowest block of which a weight is trained, or that of the last one."""
    trained = (at for at, block in enumerate(blocks(lm)) if any(p.requires_grad for p in block.parameters()))
    return next(trained, len(blocks(lm)) - 1)


def make_trunk(lm: PreTrainedModel, heads: Sequence[int] = ()) -> Trunk | str:
    """Find the frozen blocks of a model whose output can be kept.

    Args:
        lm: The language model, with `requires_grad` set as it will be trained.
        heads: Numbers of the blocks at which heads with blocks of their own branch off.

    Returns:
        What runs the blocks above; or the reason, in words, why all blocks have to run.
    """
    if is_encoder_decoder(lm):
        return "an encoder-decoder passes more from block to block than states"
    if rotates_by_length(lm):
        return "rotary embeddings depend on the longest sample of a batch, and states are kept for other batches"
    lowest = min([*heads, lowest_trained(lm)])
    if lowest == 0:
        return "the lowest block is trained, or it is the only one"
    with torch.enable_grad():
        entering = run_base(lm, probe(lm), [lowest])[1][lowest]
    if entering.hidden.requires_grad:
        return "weights below the blocks are trained"
    small = lowest_blocks(lm, 2)
    try:
        trunk = Trunk(lm, lowest)
        agrees = trunk.agrees()  # of weights that are still in files this shows only whether it runs
        if small is not lm:
            agrees = Trunk(small, 1).agrees()
    except Exception:  # code of a family whose blocks read what lower ones have left may fail in any way
        agrees = False
    return trunk if agrees else reads_below(lm)
