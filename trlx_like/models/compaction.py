"""The cheapest way in which a causal model can read a batch: rows as they are, packed rows, or shared prompts once.

What a way costs is estimated by its tokens and the pairs of tokens in attention. Scores and gradients are those of
whole rows, but for rounding. Models with dropout read whole rows, since another layout would draw other numbers.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from trlx_like.data import Completion
from trlx_like.models.attention import recomputes
from trlx_like.models.dropout import evaluating, has_dropout
from trlx_like.models.last_states import can_skip_unread
from trlx_like.models.layout import embedding_width, rotates_by_length, run_base
from trlx_like.models.packed_rows import PackedRows, RowPlan, pieces_of
from trlx_like.models.pieces import Piece, in_order, set_pieces
from trlx_like.models.shared_prompts import SharedPrompts, can_share, is_read_in_order, same_prompts, why_no_cache
from trlx_like.models.unread import lowest_blocks

LEAST_SAVING = 0.05
"""The least part of the cost that packing must save."""
TWO_PASSES = 1.15
"""What sharing prompts costs beside its tokens: two passes are slower than one of as many tokens."""
KERNEL_CALL = 1200
"""What a call of the attention kernel costs beside what it computes, in tokens times H: 8 tokens if H is 150."""
PROBE_LENGTHS = ((1, 3), (1, 2), (3, 1), (3, 4), (2, 2))
"""The tokens of prompts and responses of rows with which models are tested."""
LONG_ROW = 1024
"""The tokens of a row in which attention is computed piece by piece. Its mask is as large as their square."""
MORE_ROWS = 4
"""Up to so many rows more than necessary are tried, and those are taken that have the least padding."""

EVEN = 16
"""Rows of a multiple of so many tokens stay as long as they are, and packed rows may get such a length: torch attends
faster in them. On a CPU attention of 64 tokens takes .6 of the time of 63, and its gradient .8."""
UNEVEN = 18
"""Attention in rows of any other length takes as long as if each token saw so many tokens more."""


@dataclass(frozen=True)
class Compaction:
    """Choose how a batch is read.

    Attributes:
        hidden: The width of the hidden states, H.
        share: Whether a shared prompt may be read in a pass of its own.
        longest: The longest packed row that the model can read, in tokens; 0: rows are not packed.
        in_pieces: The longest row in which it can attend piece by piece, in tokens; 0: none.
        bias: Format of a mask that is added to attention scores; None: masks are boolean.
        skips_unread: Whether the last block may compute the tokens alone that are read. With dropout it draws numbers
            for these alone.
        skips_last: Whether the last token of a response may be left out, which no score depends on.
    """

    hidden: int
    share: bool = False
    longest: int = 0
    in_pieces: int = 0
    bias: torch.dtype | None = None
    skips_unread: bool = False
    skips_last: bool = False

    def of(
        self, batch: Completion, branches: bool = False, whole: int | None = None
    ) -> PackedRows | SharedPrompts | None:
        """Return how to read a batch; None: row by row.

        Args:
            batch: The batch.
            branches: Whether the states that enter some blocks are needed, which a pass of prompts does not give.
            whole: The width of rows that are read as they are; None: that of the batch.
        """
        inputs = batch.inputs()
        if "attention_mask" not in inputs:
            return self._of_packed(batch, inputs)
        (rows, prompt), response = batch.prompt.shape, batch.response.shape[1]
        same = same_prompts(batch)
        shared = SharedPrompts.of(batch, same) if self.share and not branches else None
        width = whole or prompt + response
        best = (1 - LEAST_SAVING) * self._cost(rows, width)
        if shared is not None:
            written = self._cost(rows, response, prompt + response)
            best = min(best, TWO_PASSES * (self._cost(len(shared.first), prompt) + written))
        if self.longest:
            columns = [same, batch.prompt_mask.sum(dim=1), batch.mask.sum(dim=1)]
            of_row, prompts, responses = torch.stack(columns).tolist()  # one transfer from the device
            if self.bias is None and sum(prompts) + sum(responses) == rows * width:  # without padding there is no mask
                if len(set(of_row)) == rows:
                    return None  # there is nothing to save, so no plans are made
                best = min(best, (1 - LEAST_SAVING) * self._cost(rows, width, in_order(width)))
            plans = [plan for plan in self._plans(of_row, prompts, responses, branches, best) if plan[0] < best]
            if plans:
                _, plan, pieces = min(plans, key=itemgetter(0))
                return PackedRows.of(batch, plan, self.bias, pieces)
        return shared

    def without_last(self, batch: Completion) -> Completion:
        """Return what has to be read of a batch for scores of its responses: all, or all but their last tokens."""
        prompt, response = batch.prompt.shape[1], batch.response.shape[1]
        short = self.skips_last and response > 1 and (prompt + response) % EVEN
        return batch.without_last() if short else batch

    def _of_packed(self, batch: Completion, inputs: dict[str, Tensor]) -> PackedRows | None:
        """Return rows that hold several samples already, to attend piece by piece; None if a mask costs less."""
        rows, width = inputs["position_ids"].shape
        if width > self.in_pieces:
            return None
        pieces = pieces_of(inputs["position_ids"], torch.cat([batch.prompt_mask, batch.mask], dim=1))
        saves = self._cost_in_pieces(rows * width, pieces) < (1 - LEAST_SAVING) * self._cost(rows, width)
        return PackedRows.of_packed(inputs, pieces) if saves else None

    def _plans(
        self, of_row: Sequence[int], prompts: Sequence[int], responses: Sequence[int], branches: bool, most: float
    ) -> Iterator[tuple[float, RowPlan, Sequence[Piece]]]:
        """Yield what it costs to read packed rows, in tokens, how they are packed, and the pieces of attention.

        In rows of `EVEN` tokens the place of a sample changes its rounding, which it must not where states may be kept,
        so that results without them are the same. Plans that would cost more than `most` may be left out.
        """
        alone = range(len(of_row))
        in_pairs = _in_groups(of_row, prompts, responses, self.longest, 2)
        for groups, multiple in product((alone, in_pairs), (1,) if branches else (1, EVEN)):
            plan = RowPlan.of(groups, prompts, responses, multiple=multiple)
            yield self._cost(plan.rows, plan.width) if plan.width <= self.longest else math.inf, plan, ()
        if self.in_pieces:
            for groups in (alone, _in_groups(of_row, prompts, responses, min(self.in_pieces, LONG_ROW))):
                sizes = _sizes(groups, prompts, responses)
                if sum(sizes) + len(sizes) * KERNEL_CALL / self.hidden > most:  # with a call for each group alone
                    continue
                plan = _in_long_rows(groups, prompts, responses, self.in_pieces)
                pieces = plan.pieces(prompts, responses)
                cost = self._cost_in_pieces(plan.rows * plan.width, pieces)
                yield cost if plan.width <= self.in_pieces else math.inf, plan, pieces

    def _cost(self, rows: int, width: int, seen: float | None = None) -> float:
        """Return what rows cost, in tokens. With 2 H tokens to see, attention costs as much as all else."""
        return rows * width * (1 + ((seen or width) + _uneven(width)) / (2 * self.hidden))

    def _cost_in_pieces(self, tokens: int, pieces: Sequence[Piece]) -> float:
        """Return what rows cost in which attention is computed piece by piece, in tokens."""
        real = [piece for piece in pieces if piece.prompt_piece is not None]
        seen = sum(piece.pairs + piece.count * piece.length * _uneven(piece.length) for piece in real)
        return tokens + (seen / 2 + len(real) * KERNEL_CALL) / self.hidden

    def also_of(self, lm: PreTrainedModel) -> Compaction:
        """Return what another model, which gets the same inputs, can do as well."""
        other = compaction_of(lm)
        longest = min(self.longest, other.longest) if self.bias == other.bias else 0
        share = self.share and why_no_cache(lm) is None and not rotates_by_length(lm)
        in_pieces = min(self.in_pieces, other.in_pieces) if longest else 0
        skips = self.skips_unread and other.skips_unread
        last = self.skips_last and other.skips_last
        return replace(self, share=share, longest=longest, in_pieces=in_pieces, skips_unread=skips, skips_last=last)


def _in_groups(
    of_row: Sequence[int], prompts: Sequence[int], responses: Sequence[int], longest: int, most: int = sys.maxsize
) -> list[int]:
    """Number groups of rows that have the same prompt and fit into a packed row together, by their first row. [B]

    Where a mask is applied, attention costs more than the prompts that are saved if there are more than two rows to a
    group, unless prompts are much longer than responses.

    Args:
        of_row: The number of the prompt of each row. [B]
        prompts: The tokens of each prompt. [B]
        responses: The tokens of each response. [B]
        longest: The most tokens of a packed row.
        most: The most rows of a group.
    """
    open_: dict[int, tuple[int, int, int]] = {}  # by prompt: a group, its tokens, and its rows
    groups = []
    for number, (same, prompt, response) in enumerate(zip(of_row, prompts, responses, strict=True)):
        group, tokens, rows = open_.get(same, (number, longest, 0))
        if rows == most or tokens + response > longest:
            group, tokens, rows = number, prompt, 0
        open_[same] = group, tokens + response, rows + 1
        groups.append(group)
    return groups


def _uneven(width: int) -> int:
    """Return `UNEVEN` for rows whose width is no multiple of `EVEN`, else 0."""
    return UNEVEN if width % EVEN else 0


def _sizes(groups: Sequence[int], prompts: Sequence[int], responses: Sequence[int]) -> list[int]:
    """Return the tokens of each group. The arguments are those of `RowPlan.of`."""
    sizes = Counter[int]()
    for row, group in enumerate(groups):
        sizes[group] += responses[row] + (prompts[row] if group == row else 0)
    return list(sizes.values())


def _in_long_rows(groups: Sequence[int], prompts: Sequence[int], responses: Sequence[int], longest: int) -> RowPlan:
    """Plan rows that are filled evenly, of about `LONG_ROW` tokens at most, or longer if a group is."""
    sizes = _sizes(groups, prompts, responses)
    fewest = -(-sum(sizes) // max(*sizes, min(LONG_ROW, longest)))
    most = fewest + MORE_ROWS if fewest > 1 else 1  # one row has no padding
    plans = [RowPlan.of(groups, prompts, responses, rows) for rows in range(fewest, most + 1)]
    return min(plans, key=lambda plan: (plan.width > longest, plan.rows * plan.width))


def compaction_of(lm: PreTrainedModel, sharded: bool = False, device: torch.device | None = None) -> Compaction:
    """Find out what a model can do.

    Args:
        lm: A language model, or a classifier that reads a sequence at its end.
        sharded: Its weights are divided over processes, which must all run it equally often.
        device: Where it will run; None: where it is.
    """
    bias = lm.dtype if lm.config._attn_implementation == "eager" else None
    width = embedding_width(lm.get_input_embeddings())
    longest = _longest(lm, bias)
    in_pieces = _longest_in_pieces(lm, longest) if longest and (device or lm.device).type == "cpu" else 0
    share = can_share(lm) and not sharded
    return Compaction(width, share, longest, in_pieces, bias, can_skip_unread(lm), is_read_in_order(lm))


def _longest(lm: PreTrainedModel, bias: torch.dtype | None) -> int:
    """Return the tokens of the longest packed row that a model reads as the rows of a batch, or 0 if there is none."""
    known = lm.config._attn_implementation in ("sdpa", "eager")  # others take no mask for each pair of tokens
    if not known or why_no_cache(lm) is not None or has_dropout(lm) or lm.is_remote_code():
        return 0
    longest = min(_window(lm), _positions(lm))  # all of the row has to be in a window
    return longest if _agrees(lowest_blocks(lm, 2), bias, PROBE_LENGTHS) else 0


def _longest_in_pieces(lm: PreTrainedModel, longest: int) -> int:
    """Return the tokens of the longest packed row in which a model on a CPU attends piece by piece; 0 if it does not.

    Its positions start again within a row, so that it may have more tokens than the model has positions.
    """
    attends = lm.config._attn_implementation == "sdpa" and lm._supports_attention_backend
    if not attends or recomputes(lm):
        return 0
    small, window, positions = lowest_blocks(lm, 2), _window(lm), _positions(lm)
    more = [(3, 5), (3, 2)] * (min(positions, LONG_ROW // 2) // 10 + 1)  # than the model has positions
    if positions < min(LONG_ROW // 2, window) and _agrees(small, None, more, in_pieces=True):
        return window
    return longest if _agrees(small, None, PROBE_LENGTHS, in_pieces=True) else 0


def _window(lm: PreTrainedModel) -> int:
    """Return the tokens that a model sees at most, in places of a row, or sys.maxsize if it sees all."""
    config = lm.config.get_text_config(decoder=True)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    return min((limit for limit in (*windows, getattr(config, "window_size", None)) if limit), default=sys.maxsize)


def _positions(lm: PreTrainedModel) -> int:
    """Return the number of positions of a model, or sys.maxsize if its configuration names none."""
    return getattr(lm.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def _agrees(
    lm: PreTrainedModel, bias: torch.dtype | None, rows: Sequence[tuple[int, int]], in_pieces: bool = False
) -> bool:
    """Test whether a model computes the same in packed rows: it has to follow both mask and positions.

    Args:
        lm: The model.
        bias: As for `PackedRows.of`.
        rows: The tokens of prompts and responses. Two rows behind each other get the same prompt, but the last one if
            their number is odd.
        in_pieces: Whether all are one row, in which attention is computed piece by piece.
    """
    ids = torch.arange(100, device=lm.device) % lm.config.get_text_config().vocab_size
    groups = [number - number % 2 for number in range(len(rows))]
    parts = [(ids[9 * p : 10 * p], ids[7 * (n % 5) : 7 * (n % 5) + r]) for n, (p, r) in enumerate(rows)]
    batch = Completion.collate([Completion.of_ids(*pair) for pair in parts])
    prompts, responses = zip(*rows, strict=True)
    plan = RowPlan.of(groups, prompts, responses, 1 if in_pieces else None)
    packed = PackedRows.of(batch, plan, bias)
    if in_pieces:  # a layer that applied this mask would mix the samples
        packed.inputs["attention_mask"] = torch.ones_like(packed.inputs["attention_mask"])
        set_pieces(packed.inputs["attention_mask"], plan.pieces(prompts, responses))
    try:
        with torch.no_grad(), evaluating(lm):
            whole, other = run_base(lm, batch.inputs())[0], packed.unpack(run_base(lm, packed.inputs)[0])
    except Exception:  # code of a family that expects a mask [B, T] may fail in any way
        return False
    real = batch.inputs()["attention_mask"].bool()
    difference = (whole - other)[real].float().norm()
    # Rounding is far below these bounds, and another mask is far above, even with random weights.
    return bool(difference < (1e-3 if lm.dtype.itemsize >= 4 else 2e-2) * whole[real].float().norm())
