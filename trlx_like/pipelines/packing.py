"""Packing: several samples in one row of tokens. No token is lost, since a sample that does not fit is split.

The first token of a piece of a sample is not learned, since nothing precedes it. Therefore the next piece begins with
the last token of this one, and every output is learned exactly once.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from trlx_like.data.columns import Column, ranges
from trlx_like.data.flat import FlatRows
from trlx_like.functional.bins import best_fit
from trlx_like.pipelines.tokens import Dialogue


class Packing:
    """Hold the pieces of samples that make up each row.

    Args:
        samples: The samples.
        row: The number of the row that each piece is in. Pieces of a row keep their order. [K] int64
        starts: The place of each piece's first token among the tokens of all samples. [K] int64
        lengths: The tokens of each piece. [K] int64

    Attributes:
        sizes: The tokens of each row. [N] int64
    """

    def __init__(self, samples: FlatRows[Dialogue], row: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._ids = Column.of(samples, "ids")
        self._is_output = torch.from_numpy(samples.values("is_output"))
        order = np.argsort(row, kind="stable")
        self._starts, self._lengths = torch.from_numpy(starts[order]), torch.from_numpy(lengths[order])
        numbers, pieces = (torch.from_numpy(found) for found in np.unique(row, return_counts=True))
        self._pieces = Column(torch.arange(len(order)), pieces.cumsum(0) - pieces, pieces)
        self.sizes = torch.from_numpy(np.bincount(row, lengths).astype(np.int64))[numbers]

    def taken(self, rows: Tensor) -> dict[str, Column]:
        """Return ids, what is learned, and the number of the piece in its row, of each token in some rows.

        Args:
            rows: The numbers of the rows. [n] int64
        """
        which = self._pieces.taken(rows)
        assert which.lengths is not None
        pieces = ranges(which.starts, which.lengths)  # the numbers of all pieces in these rows
        lengths = self._lengths[pieces]
        places = ranges(self._starts[pieces], lengths)
        learned = self._is_output[places]
        learned[lengths.cumsum(0) - lengths] = False
        piece = (pieces - which.starts.repeat_interleave(which.lengths)).repeat_interleave(lengths)
        found = {"ids": self._ids.values[places].long(), "learned": learned, "piece": piece}
        sizes = self.sizes[rows]
        return {name: Column(values, sizes.cumsum(0) - sizes, sizes) for name, values in found.items()}


def fit_best(samples: FlatRows[Dialogue], max_length: int) -> Packing:
    """Put samples into rows where they fit best, the longest first. A sample is split only if no row could hold it.

    Args:
        samples: The samples.
        max_length: The tokens of a row, at least 2.
    """
    sizes = samples.lengths("ids")
    counts = np.maximum(-(-(sizes - 1) // (max_length - 1)), 1)  # pieces of each sample
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its sample
    starts = number * (max_length - 1)
    lengths = np.minimum(np.repeat(sizes, counts) - starts, max_length)
    starts += np.repeat(np.cumsum(sizes) - sizes, counts)
    useful = _outputs(samples, starts, lengths) > 0
    starts, lengths = starts[useful], lengths[useful]
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    row = best_fit(lengths.tolist(), max_length)
    return Packing(samples, np.asarray(row, dtype=np.int64), starts, lengths)


def fill_blocks(samples: FlatRows[Dialogue], max_length: int) -> Packing:
    """Put samples into rows in their order, and split those that reach the end of a row.

    At most one token of a row is left free, except in the last row. Rows that have nothing to learn are left out.

    Args:
        samples: The samples.
        max_length: The tokens of a row, at least 2.
    """
    row, starts, lengths = array("q"), array("q"), array("q")
    number, left, begin = 0, max_length, 0
    for size in samples.lengths("ids").tolist():
        start = 0
        while start < size - 1:
            if left < 2:  # the first token of a piece is not learned
                number, left = number + 1, max_length
            length = min(size - start, left)
            row.append(number)
            starts.append(begin + start)
            lengths.append(length)
            left -= length
            start += length - 1
        begin += size
    pieces = [np.asarray(values, dtype=np.int64) for values in (row, starts, lengths)]
    kept = np.bincount(pieces[0], _outputs(samples, *pieces[1:]))[pieces[0]] > 0
    return Packing(samples, *(values[kept] for values in pieces))


def _outputs(samples: FlatRows[Dialogue], starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count the outputs of pieces after their first token. The pieces are in the order of the samples. [K] int64"""
    flags = np.append(samples.values("is_output"), False)
    bounds = np.stack([starts + 1, starts + lengths], axis=1).ravel()
    return np.where(lengths > 1, np.add.reduceat(flags, bounds, dtype=np.int64)[::2], 0)
