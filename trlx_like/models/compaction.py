"""Whether a causal model reads the rows of a batch as they are, packed, or with their shared prompts apart.

The cheapest of the three is taken, by the number of tokens and the area of attention. Scores and gradients are those of
whole rows, but for rounding. Models with dropout read whole rows, since another layout would draw other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from trlx_like.data import Completion
from trlx_like.models.dropout import evaluating, has_dropout
from trlx_like.models.layout import embedding_width, run_base
from trlx_like.models.packed_rows import PackedRows, RowPlan
from trlx_like.models.reading import picks
from trlx_like.models.shared_prompts import SharedPrompts, can_share, same_prompts, why_no_cache
from trlx_like.models.unread import lowest_blocks

SAVED = 0.05
"""The least part of the cost that packing must save."""
TWO_PASSES = 1.15
"""What sharing prompts costs beside its tokens: two passes are slower than one of as many tokens."""


@dataclass(frozen=True)
class Compaction:
    """Choose how a batch is read.

    Attributes:
        hidden: The width of the hidden states, H.
        share: Whether a shared prompt may be read in a pass of its own.
        longest: The longest packed row that the model can read, in tokens; 0: rows are not packed.
        bias: Format of a mask that is added to attention scores; None: masks are boolean.
        picks: Whether the last feed-forward network may compute the tokens alone that are read.
    """

    hidden: int
    share: bool = False
    longest: int = 0
    bias: torch.dtype | None = None
    picks: bool = False

    def of(
        self, batch: Completion, branches: bool = False, whole: int | None = None
    ) -> PackedRows | SharedPrompts | None:
        """Return how to read a batch; None: row by row.

        Args:
            batch: The batch.
            branches: Whether the states that enter some blocks are needed, which a pass of prompts does not give.
            whole: The width of rows that are read as they are; None: that of the batch.
        """
        if "attention_mask" not in batch.inputs():  # packed before
            return None
        (rows, prompt), response = batch.prompt.shape, batch.response.shape[1]
        same = same_prompts(batch)
        shared = SharedPrompts.of(batch, same) if self.share and not branches else None
        best = (1 - SAVED) * self._cost(rows, whole or prompt + response)
        if shared is not None:
            written = self._cost(rows, response, prompt + response)
            best = min(best, TWO_PASSES * (self._cost(len(shared.first), prompt) + written))
        if self.longest:
            columns = [same, batch.prompt_mask.sum(dim=1), batch.mask.sum(dim=1)]
            of_row, prompts, responses = torch.stack(columns).tolist()  # one transfer from the device
            groupings = range(rows), _in_pairs(of_row, prompts, responses, self.longest)
            plans = [RowPlan.of(groups, prompts, responses) for groups in groupings]
            cost, plan = min(((self._cost(plan.rows, plan.width), plan) for plan in plans), key=itemgetter(0))
            if cost < best and plan.width <= self.longest:
                return PackedRows.of(batch, plan, self.bias)
        return shared

    def _cost(self, rows: int, width: int, seen: int | None = None) -> float:
        """Return what rows cost, in tokens. With 2 H tokens to see, attention costs as much as all else."""
        return rows * width * (1 + (seen or width) / (2 * self.hidden))

    def also_of(self, lm: PreTrainedModel) -> Compaction:
        """Return what another model, which gets the same inputs, can do as well."""
        other = compaction_of(lm)
        longest = min(self.longest, other.longest) if self.bias == other.bias else 0
        share, picked = self.share and why_no_cache(lm) is None, self.picks and other.picks
        return replace(self, share=share, longest=longest, picks=picked)


def _in_pairs(of_row: Sequence[int], prompts: Sequence[int], responses: Sequence[int], longest: int) -> list[int]:
    """Number groups of two rows that have the same prompt and fit into a packed row together, and other rows alone. [B]

    In larger groups attention costs more than the prompts that are saved, unless these are much longer than responses.
    """
    waiting: dict[int, tuple[int, int]] = {}  # by prompt: the group of a row that has no second one, and its tokens
    groups = []
    for number, (same, prompt, response) in enumerate(zip(of_row, prompts, responses, strict=True)):
        group, tokens = waiting.pop(same, (number, longest))
        if tokens + response > longest:
            group = number
            waiting[same] = number, prompt + response
        groups.append(group)
    return groups


def compaction_of(lm: PreTrainedModel, sharded: bool = False) -> Compaction:
    """Find out what a model can do.

    Args:
        lm: A language model, or a classifier that reads a sequence at its end.
        sharded: Its weights are divided over processes, which must all run it equally often.
    """
    bias = lm.dtype if lm.config._attn_implementation == "eager" else None
    width = embedding_width(lm.get_input_embeddings())
    return Compaction(width, can_share(lm) and not sharded, _longest(lm, bias), bias, picks(lm))


def _longest(lm: PreTrainedModel, bias: torch.dtype | None) -> int:
    """Return the tokens of the longest packed row that a model reads as the rows of a batch, or 0 if there is none."""
    known = lm.config._attn_implementation in ("sdpa", "eager")  # others take no mask for each pair of tokens
    if not known or why_no_cache(lm) is not None or has_dropout(lm) or lm.is_remote_code():
        return 0
    config = lm.config.get_text_config(decoder=True)
    # A window counts places in the row, so all of the row has to be in it.
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    limits = [*windows, *(getattr(config, name, None) for name in ("window_size", "max_position_embeddings"))]
    return min((limit for limit in limits if limit), default=sys.maxsize) if _agrees(lowest_blocks(lm, 2), bias) else 0


def _agrees(lm: PreTrainedModel, bias: torch.dtype | None) -> bool:
    """Test whether a model computes the same in packed rows: it has to follow both mask and positions."""
    ids = torch.arange(100, device=lm.device) % lm.config.get_text_config().vocab_size
    prompts, responses = (1, 1, 3, 3, 2), (3, 2, 1, 4, 2)
    rows = [
        (ids[9 * p : 10 * p], ids[7 * n : 7 * n + r]) for n, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    batch = Completion.collate(
        [Completion(p, torch.ones_like(p).bool(), r, torch.ones_like(r).bool()) for p, r in rows]
    )
    packed = PackedRows.of(batch, RowPlan.of((0, 0, 1, 1, 2), prompts, responses), bias)
    try:
        with torch.no_grad(), evaluating(lm):
            whole, other = run_base(lm, batch.inputs())[0], packed.unpack(run_base(lm, packed.inputs)[0])
    except Exception:  # code of a family that expects a mask [B, T] may fail in any way
        return False
    real = batch.inputs()["attention_mask"].bool()
    difference = (whole - other)[real].float().norm()
    # Rounding is far below these bounds, and another mask is far above, even with random weights.
    return bool(difference < (1e-3 if lm.dtype.itemsize >= 4 else 2e-2) * whole[real].float().norm())
