"""The top blocks of a language model: freezing what is below them, and copies that run from their recorded inputs."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.models.last_states import read_at
from trlx_like.models.layout import (
    BlockInputs,
    base_model,
    blocks,
    embedding_width,
    find_blocks,
    probe,
    recorded,
    run_base,
)
from trlx_like.models.pieces import piece_by_piece


def freeze_below(lm: PreTrainedModel, branch: int) -> None:
    """Freeze all parameters that influence the inputs of a block, tied ones and a whole encoder included.

    The parameters are found in the autograd graph, so embeddings, norms and projections need no names.

    Args:
        lm: The language model, changed in place.
        branch: The number of the block.
    """
    with torch.enable_grad():
        entering = run_base(lm, probe(lm), [branch])[1][branch]
    queue, seen = [value.grad_fn for value in (entering.hidden, *entering.inputs.values())], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            node.variable.requires_grad_(False)
        queue.extend(parent for parent, _ in node.next_functions)


class PassThrough(nn.Module):
    """Replaces a block and returns its input, as a tuple if the family's blocks return one."""

    def __init__(self, block: nn.Module, values: int | None) -> None:
        super().__init__()
        self.values = values
        # Some families read attributes such as `attention_type` of their blocks.
        for name, value in vars(block).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states unchanged."""
        return hidden_states if self.values is None else (hidden_states, *[None] * (self.values - 1))


class TopBlocks(nn.Module):
    """A copy of the top blocks, and of what follows them, that runs from the recorded inputs of its lowest block.

    The family's own forward runs. The blocks below pass their input through, and the inputs of the lowest copied block
    are replaced by the recorded ones. So masks, positions and rotary embeddings are the family's own.

    Args:
        lm: The language model. It is not changed.
        branch: The number of the lowest block that is copied.
    """

    def __init__(self, lm: PreTrainedModel, branch: int) -> None:
        super().__init__()
        with torch.no_grad(), recorded(blocks(lm)[0]) as record:
            run_base(lm, probe(lm))
        base: Any = base_model(lm)
        embeddings = base.get_input_embeddings()
        self.embedding_width = embedding_width(embeddings)
        replaced: dict[int, Any] = {id(embeddings): nn.Identity()}
        for block in blocks(lm)[:branch]:
            replaced[id(block)] = PassThrough(block, record["values"])
        self.base = copy.deepcopy(base, replaced)
        self._entering: BlockInputs | None = None
        self.count = len(blocks(lm))
        find_blocks(self.base, self.count)[branch].register_forward_pre_hook(self._inject, with_kwargs=True)

    def _inject(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the arguments of the lowest copied block by the recorded ones."""
        assert self._entering is not None
        return self._entering.args, self._entering.kwargs

    def forward(self, entering: BlockInputs, places: Tensor | None = None) -> Tensor:
        """Compute the last hidden states [B, T, H] from the inputs of the block at the branch.

        Args:
            entering: These inputs.
            places: The tokens whose states are wanted, as for `read_at`; None: all.
        """
        self._entering = entering
        ignored = entering.hidden.new_zeros(1).expand(*entering.hidden.shape[:2], self.embedding_width)
        given = {name: value for name, value in entering.inputs.items() if name != "input_ids"}
        with (
            piece_by_piece(self.base, given.get("attention_mask")),
            read_at(self.base, find_blocks(self.base, self.count)[-1], places),
        ):
            return cast(Tensor, self.base(**given, inputs_embeds=ignored, use_cache=False).last_hidden_state)
