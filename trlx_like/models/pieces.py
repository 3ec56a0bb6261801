"""Attention in packed rows piece by piece: each response attends to its prompt and to itself.

With a mask, torch's kernel computes all pairs of tokens of a row, most of which are of two samples or in the wrong
order. Without, rows may be long, so that nothing is padded. `attention` lets a model attend so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations.sdpa_attention import repeat_kv


@dataclass(frozen=True)
class Piece:
    """Tokens that stand behind each other in packed rows: a prompt with a response, further responses, or nothing.

    Attributes:
        length: The tokens of each response, and of the prompt if that is here too, L.
        prompt_piece: The number of the piece that begins with the prompt, its own if that is here; None: padding, which
            does not attend.
        prompt_length: The tokens of a prompt in another piece, P; 0: it is here.
        count: How many responses there are, n.
    """

    length: int
    prompt_piece: int | None = None
    prompt_length: int = 0
    count: int = 1

    @property
    def pairs(self) -> float:
        """The pairs of tokens that the kernel computes."""
        seen = self.prompt_length + self.length if self.prompt_length else in_order(self.length)
        return 0 if self.prompt_piece is None else self.count * self.length * seen

    @property
    def mask(self) -> Tensor | None:
        """True where a token of a response sees one of prompt and response; None: the kernel's own. [L, P + L] bool"""
        if not self.prompt_length:
            return None
        return torch.ones(self.length, self.prompt_length + self.length, dtype=torch.bool).tril(self.prompt_length)


def in_order(tokens: int) -> float:
    """Return how many tokens the kernel computes for each of some that see those before them, in blocks of 32."""
    return (tokens + min(32, tokens)) / 2


_PIECES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The pieces of the rows that a mask belongs to, each with its own mask, by the mask."""


def set_pieces(mask: Tensor, pieces: Sequence[Piece]) -> None:
    """Tell what the packed rows [N, W] that belong to a mask [N, 1, W, W] consist of.

    Args:
        mask: The mask of the attention. As long as it exists, `piece_by_piece` knows the pieces.
        pieces: All N W tokens of the rows, one row after the other.
    """
    _PIECES[mask] = [(piece, piece.mask) for piece in pieces]


def pairs_in_pieces(mask: Tensor | None) -> float | None:
    """Return the pairs of tokens that `attend_in_pieces` computes with a mask; None if it has no pieces."""
    pieces = None if mask is None else _PIECES.get(mask)
    return None if pieces is None else sum(piece.pairs for piece, _ in pieces)


def attend_in_pieces(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor | None:
    """Compute softmax(q k^T scale) v over visible tokens.

    Args:
        query: The states that attend. [N, heads, W, width]
        key: The keys; each serves several heads if there are fewer of them. [N, groups, W, width]
        value: The values. [N, groups, W, width]
        mask: The mask of `set_pieces`.
        scale: Multiplies the products of queries and keys; None: width ** -.5.

    Returns:
        The attended values [N, W, heads, width], zero at tokens of no sample; None if the mask has no pieces.
    """
    if (pieces := _PIECES.get(mask)) is None:
        return None
    groups = query.shape[1] // key.shape[1]
    whole = query, repeat_kv(key, groups), repeat_kv(value, groups)
    sizes = [piece.count * piece.length for piece, _ in pieces]
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1).split(sizes) for states in whole)
    made = [_attend(piece, mask, queries[at], keys, values, at, scale) for at, (piece, mask) in enumerate(pieces)]
    rows, heads, width, _ = query.shape
    return torch.cat(made).view(rows, width, heads, -1)


def _attend(
    piece: Piece,
    mask: Tensor | None,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    at: int,
    scale: float | None,
) -> Tensor:
    """Compute the attended values [n L, heads, width] of one piece, given the keys and values of all."""
    if piece.prompt_piece is None:
        return torch.zeros_like(values[at])
    batch = [states.unflatten(0, (piece.count, piece.length)) for states in (query, keys[at], values[at])]
    if piece.prompt_length:
        shared = [
            states[piece.prompt_piece][: piece.prompt_length].expand(piece.count, -1, -1, -1)
            for states in (keys, values)
        ]
        batch[1:] = [torch.cat(pair, dim=1) for pair in zip(shared, batch[1:], strict=True)]
    query, key, value = (states.transpose(1, 2) for states in batch)
    made = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return made.transpose(1, 2).flatten(0, 1)
