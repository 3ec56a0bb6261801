"""The top blocks of a language model: freezing what is below them, and copies that run from their recorded inputs."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.models.attention import piece_by_piece
from trlx_like.models.dropout import evaluating
from trlx_like.models.last_states import read_at
from trlx_like.models.layout import (
    BlockInputs,
    base_model,
    blocks,
    embedding_width,
    find_blocks,
    is_encoder_decoder,
    padded_probe,
    probe,
    recorded,
    run_base,
    top_from,
)
from trlx_like.models.merging import has_adapter
from trlx_like.models.unread import has_unread, lowest_blocks

logger = logging.getLogger(__name__)


def freeze_below(lm: PreTrainedModel, branch: int) -> None:
    """Freeze all parameters that influence the inputs of a block, tied ones and a whole encoder included.

    The parameters are found in the autograd graph, so embeddings, norms and projections need no names. Experts that the
    test run does not choose are not in it, so blocks below and an encoder are frozen as a whole.

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
    for part in [*blocks(lm)[:branch], *([cast(Any, lm.get_encoder())] if is_encoder_decoder(lm) else [])]:
        part.requires_grad_(False)


def tell_frozen_before(lm: PreTrainedModel, num_layers_unfrozen: int) -> None:
    """Log how many weights stay frozen that the option would train, since an earlier run or the caller froze them.

    Args:
        lm: The model, before anything is frozen as the option says.
        num_layers_unfrozen: `model.num_layers_unfrozen`.
    """
    if num_layers_unfrozen == 0 or has_adapter(lm):  # whose weights are to be frozen
        return
    whole: list[nn.Module] = [lm]
    parts = whole if num_layers_unfrozen < 0 else list(blocks(lm))[top_from(lm, num_layers_unfrozen) :]
    frozen = [name for part in parts for name, weight in part.named_parameters() if not weight.requires_grad]
    if frozen:
        logger.info(
            "model.num_layers_unfrozen (%d): %d weights were frozen in the model before and stay so, such as %s.",
            *(num_layers_unfrozen, len(frozen), frozen[0]),
        )


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

    def agrees(self, lm: PreTrainedModel, branch: int) -> bool:
        """Test whether it computes the same as the model that it was copied from, at the same branch."""
        inputs = padded_probe(lm)
        with torch.no_grad(), evaluating(lm), evaluating(self):
            whole, entering = run_base(lm, inputs, [branch])
            above = self(entering[branch])
        real = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
        real = real & whole.isfinite().all(dim=-1)  # whatever is copied from a model that has diverged agrees
        # Rounding is far below this bound, and what a block misses is far above, even with random weights.
        return bool((whole - above)[real].float().norm() <= 1e-3 * whole[real].float().norm())


def reads_below(lm: PreTrainedModel) -> str:
    """Say in words that blocks of a model need more than the states that enter the lowest of them."""
    return f"blocks of {type(lm).__name__} read more than the states of the block below"


def copied_top(lm: PreTrainedModel, branch: int) -> TopBlocks | None:
    """Copy the top blocks of a model.

    Args:
        lm: The language model. It is not changed.
        branch: The number of the lowest block that is copied.

    Returns:
        The copy; None if these blocks read more than the inputs of the lowest one, such as the keys of blocks below.
    """
    small = None
    if has_unread(lm) and not is_encoder_decoder(lm):  # whose encoder would have to be read whole
        small = lowest_blocks(lm, 2)
        for at, block in enumerate(blocks(small)[2:], start=2):  # one module in several places would have one hook
            blocks(small)[at] = copy.deepcopy(block, {id(weight): weight for weight in block.parameters()})
    try:
        top = TopBlocks(lm, branch)
        agrees = top.agrees(lm, branch)  # of weights that are still in files this shows only whether it runs
        if small is not None:
            branch = min(branch, 1)
            agrees = agrees and TopBlocks(small, branch).agrees(small, branch)
    except Exception:  # code of a family whose blocks read what lower ones have left may fail in any way
        return None
    return top if agrees else None
