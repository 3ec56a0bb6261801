"""Rows of a batch packed into fewer and fuller ones, in which each token sees what it would see in its own row.

A shared prompt stands once, before several responses to it: a pair of DPO is a prompt with two answers. A mask keeps
responses apart, and positions are those in the row of the batch. Everything is computed in one pass, so that sharded
weights are gathered equally often on all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trlx_like.data import Completion
from trlx_like.functional.bins import balanced, best_fit
from trlx_like.models.pieces import Piece, set_pieces


@dataclass
class RowPlan:
    """Tell where a row of tokens has which prompts and responses. Numbers are those of one batch of B rows."""

    rows: int  # N
    width: int  # W
    prompt: list[int]  # [B], the place of the first prompt token of each row among the N W tokens
    response: list[int]  # [B], that of the first response token
    reads: list[bool]  # [B], whether the prompt is taken from this row; the others have the same one

    @classmethod
    def of(
        cls,
        group: Sequence[int],
        prompts: Sequence[int],
        responses: Sequence[int],
        rows: int | None = None,
        multiple: int = 1,
    ) -> RowPlan:
        """Fill packed rows.

        Args:
            group: The number of a group for each row of the batch. Rows of a group have the same prompt. [B]
            prompts: The tokens of each prompt. [B]
            responses: The tokens of each response. [B]
            rows: How many rows are filled evenly; None: as few as possible, which are as long as the longest group.
            multiple: The length of a row is a multiple of so many tokens.
        """
        sizes: dict[int, int] = {}  # of each group
        reads, offsets = [], []
        for of_row, prompt, response in zip(group, prompts, responses, strict=True):
            reads.append(of_row not in sizes)
            offsets.append(sizes.setdefault(of_row, prompt))
            sizes[of_row] += response
        order = sorted(sizes, key=sizes.__getitem__, reverse=True)
        lengths = [sizes[of_row] for of_row in order]
        into = best_fit(lengths, _up(lengths[0], multiple)) if rows is None else balanced(lengths, rows)
        filled: dict[int, int] = {}  # tokens of each packed row
        start: dict[int, tuple[int, int]] = {}  # of each group: its row and place there
        for of_row, row in zip(order, into, strict=True):
            start[of_row] = row, filled.get(row, 0)
            filled[row] = filled.get(row, 0) + sizes[of_row]
        width = _up(max(filled.values()), multiple)
        starts = [row * width + at for row, at in map(start.__getitem__, group)]
        places = [begin + offset for begin, offset in zip(starts, offsets, strict=True)]
        return cls(len(filled), width, starts, places, reads)

    def pieces(self, prompts: Sequence[int], responses: Sequence[int]) -> list[Piece]:
        """Return what all N W tokens of the rows consist of. The arguments are those of `of`."""
        made: list[Piece] = []
        first: dict[int, int] = {}  # the number of the piece that begins with a prompt, by the place of the prompt
        end = 0
        found = [
            (self.prompt[b], prompts[b] + responses[b], b) if reads else (self.response[b], responses[b], b)
            for b, reads in enumerate(self.reads)
        ]
        for begin, tokens, b in sorted(place for place in found if place[1]):
            made += [Piece(begin - end)] if begin > end else []
            end = begin + tokens
            if self.reads[b] or not prompts[b]:
                first[begin] = len(made)
                made.append(Piece(tokens, len(made)))
                continue
            before, further = made[-1], (tokens, first[self.prompt[b]], prompts[b])
            if (before.length, before.prompt_piece, before.prompt_length) == further:
                made[-1] = Piece(*further, before.count + 1)
            else:
                made.append(Piece(*further))
        missing = self.rows * self.width - end
        return [*made, Piece(missing)] if missing else made


def _up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


@dataclass
class PackedRows:
    """Hold a batch of B rows of T tokens as N packed rows of W tokens."""

    inputs: dict[str, Tensor]  # of the language model: each [N, W], and the mask [N, 1, W, W]
    source: Tensor  # [N, W] int64, the place of each packed token among the B T of the batch
    places: Tensor  # [B, T] int64, the place of each token among the N W; that of padding is any

    def pack(self, states: Tensor) -> Tensor:
        """Bring states of the batch [B, T, H] into packed rows [N, W, H]."""
        return states.flatten(0, 1)[self.source]

    def unpack(self, states: Tensor) -> Tensor:
        """Bring states of packed rows [N, W, H] back into the batch [B, T, H], where those of padding mean nothing."""
        flat: Tensor = states.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, *states.shape[2:])

    @classmethod
    def of(
        cls, batch: Completion, plan: RowPlan, bias: torch.dtype | None = None, pieces: Sequence[Piece] = ()
    ) -> PackedRows:
        """Bring a batch into the rows of a plan.

        Args:
            batch: The batch.
            plan: The plan.
            bias: Format of a mask that is added to attention scores; None: the mask is True where attention is allowed.
            pieces: What the rows consist of, for attention piece by piece; empty: the mask is applied.
        """
        whole, prompts = batch.inputs(), batch.prompt.shape[1]
        real, position = whole["attention_mask"].bool(), whole["position_ids"]  # each [B, T]
        count, width, packed = *real.shape, plan.rows * plan.width
        table = torch.tensor([plan.prompt, plan.response, plan.reads, range(count)], device=real.device)
        prompt, response, reads, number = table[:, :, None]  # each [B, 1]
        in_prompt = torch.arange(width, device=real.device) < prompts  # [T]
        places = torch.where(in_prompt, prompt, response - real[:, :prompts].sum(dim=1, keepdim=True)) + position
        # Spread out, since adding up many gradients in one place is slow on a GPU.
        places = places.where(real, torch.arange(count * width, device=real.device).view(count, width) % packed)
        taken = real & (~in_prompt | reads.bool())
        source = places.new_full((packed,), -1).index_put((places[taken],), taken.flatten().nonzero()[:, 0])
        used, source = source >= 0, source.clamp(min=0)

        def of_tokens(values: Tensor) -> Tensor:
            """Bring values [B, T] into packed rows [N, W], with -1 where these are not filled."""
            return values.expand(count, width).flatten()[source].where(used, -1).view(plan.rows, plan.width)

        group = of_tokens(prompt)  # where the prompt begins tells groups apart
        member = of_tokens(torch.where(in_prompt, -1, number))
        allowed = group[:, :, None] == group[:, None]  # [N, W, W], of queries and keys
        allowed &= (member[:, None] == -1) | (member[:, None] == member[:, :, None])
        mask = allowed.tril_()[:, None]
        if bias is not None:
            mask = torch.zeros_like(mask, dtype=bias).masked_fill(~mask, torch.finfo(bias).min)
        if pieces:
            set_pieces(mask, pieces)
        source = source.view(plan.rows, plan.width)
        inputs = {name: whole[name].flatten()[source] for name in ("input_ids", "position_ids")}
        return cls({**inputs, "attention_mask": mask}, source, places)

    @classmethod
    def of_packed(cls, inputs: dict[str, Tensor], pieces: Sequence[Piece]) -> PackedRows:
        """Leave rows as they are in which samples stand behind each other.

        Args:
            inputs: Tokens and positions, which start again with each sample. Each [N, W]
            pieces: One for each sample, in their order, and for padding.
        """
        positions = inputs["position_ids"]
        sample = (positions == 0).flatten().cumsum(dim=0).view_as(positions)
        mask = (sample[:, :, None] == sample[:, None]).tril_()[:, None]
        set_pieces(mask, pieces)
        places = torch.arange(positions.numel(), device=positions.device).view_as(positions)
        return cls({**inputs, "attention_mask": mask}, places, places)


def pieces_of(positions: Tensor, real: Tensor) -> list[Piece]:
    """Return what rows consist of in which samples stand behind each other.

    Args:
        positions: The position of each token in its sample. [N, W] int64
        real: False at padding, which counts as a sample too. [N, W] bool
    """
    begins = (positions == 0).flatten().nonzero()[:, 0]
    sizes = begins.diff(append=begins.new_tensor([positions.numel()]))
    found = zip(sizes.tolist(), real.flatten()[begins].tolist(), strict=True)
    return [Piece(size, number if used else None) for number, (size, used) in enumerate(found)]
