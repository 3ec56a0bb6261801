"""The sets of tokens that could be drawn, one set per sampled token, kept in few bytes.

Sampling with a cut, such as top-k or top-p, draws from softmax(logits / T) over a set of tokens that the sampling
policy's own logits define. The learner's logits change with every step, so it cannot find the set again: the set is
kept with the token. In 32-bit words it is the ids of its tokens, or a mask of one bit per token of the vocabulary if
that is shorter: never more than V / 8 bytes, and 4 k for top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_BITS = 32


@dataclass
class Choices:
    """Hold the sets of N tokens in the form of `encode`."""

    words: Tensor  # [L] int32: the sets, one after the other
    spans: Tensor  # [N, 2] int64: first word of each set, and its number of words

    def possible(self, spans: Tensor, vocabulary: int) -> Tensor:
        """Decode some of the sets.

        Args:
            spans: Rows of `spans`. [n, 2]
            vocabulary: The number of tokens, V.

        Returns:
            True for each token that could be drawn. [n, V] bool
        """
        start, size = spans.unbind(dim=1)
        width = mask_width(vocabulary)
        possible = torch.zeros(len(spans), vocabulary, dtype=torch.bool, device=self.words.device)
        listed = size < width
        counts = size.where(listed, 0)
        row = torch.arange(len(spans), device=counts.device).repeat_interleave(counts)
        place = torch.arange(len(row), device=counts.device) - (counts.cumsum(0) - counts)[row]
        possible[row, self.words[start[row] + place].long()] = True
        masks = self.words[start[~listed, None] + torch.arange(width, device=start.device)]  # [m, W]
        bits = (masks[:, :, None] >> torch.arange(_BITS, device=masks.device)).bitwise_and(1)
        possible[~listed] = bits.bool().flatten(1)[:, :vocabulary]
        return possible


def mask_width(vocabulary: int) -> int:
    """Return how many words a mask of the vocabulary has, W. A set of that size is a mask, a smaller one lists ids."""
    return -(-vocabulary // _BITS)


def encode(possible: Tensor) -> tuple[Tensor, Tensor]:
    """Encode sets of tokens: the ids in rising order if there are fewer than W = ceil(V / 32), otherwise a mask.

    Args:
        possible: True for each token that could be drawn. [B, V] bool

    Returns:
        The words of all rows, one row after the other [L] int32, and the number of words of each row [B] int64.
    """
    width = mask_width(possible.shape[1])
    counts = possible.sum(dim=1)
    listed = counts < width
    sizes = counts.where(listed, width)
    of_list = listed.repeat_interleave(sizes)
    words = torch.empty(len(of_list), dtype=torch.int32, device=possible.device)
    words[of_list] = possible[listed].nonzero()[:, 1].int()
    words[~of_list] = _masks(possible[~listed], width).flatten()
    return words, sizes


def by_row(steps: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Arrange the sets that were encoded for one position of all rows at a time by rows.

    Args:
        steps: What `encode` returned for each position; at least R.
        mask: True on real tokens; the sets of others are dropped. [B, R] bool

    Returns:
        The words of each row, one token after the other and padded with 0 [B, L] int32, and the number of words of
        each token [B, R] int32.
    """
    rows, width = mask.shape
    words, sizes = torch.cat([w for w, _ in steps[:width]]), torch.stack([s for _, s in steps[:width]])  # [L], [R, B]
    real = mask.T.flatten().repeat_interleave(sizes.flatten())
    row = torch.arange(rows, device=words.device).repeat(width).repeat_interleave(sizes.flatten())[real]
    sizes = sizes.T * mask
    return packed(words[real], row, sizes)


def packed(words: Tensor, row: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Arrange words by rows, in their order. The arguments are words and the row of each [L], and `sizes` [B, R].

    Returns:
        As `by_row`.
    """
    parts = words[row.argsort(stable=True)].split(sizes.sum(dim=1).tolist())
    return pad_sequence(list(parts), batch_first=True), sizes.int()


def spans(words: Tensor, sizes: Tensor) -> Tensor:
    """Return where the sets of a batch begin in its flattened words, and their sizes. [B, L], [B, R] -> [B, R, 2]"""
    first = torch.arange(len(words), device=words.device)[:, None] * words.shape[1]
    counts = sizes.long()
    return torch.stack([first + counts.cumsum(dim=1) - counts, counts], dim=-1)


def _masks(possible: Tensor, width: int) -> Tensor:
    """Pack rows of booleans [m, V] into masks of one bit each [m, W] int32."""
    padded = possible.new_zeros(len(possible), width * _BITS)
    padded[:, : possible.shape[1]] = possible
    bits = padded.int().unflatten(1, (width, _BITS)) << torch.arange(_BITS, device=possible.device, dtype=torch.int32)
    packed: Tensor = bits.sum(dim=-1, dtype=torch.int32)  # of different powers of 2: their union
    return packed
