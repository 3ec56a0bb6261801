"""Parts of tensors: the rows that `torch.chunk` gives to each process."""

from __future__ import annotations

import pytest
import torch

from trlx_like.functional.parts import Part, flat_range, row_range


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_those_of_chunk(rows: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
    ranges = [row_range(rows, rank, ranks) for rank in range(ranks)]
    assert [list(range(*own)) for own in ranges if own[0] < own[1]] == chunks
    assert ranges[-1][1] == rows


def test_a_range_counts_numbers_in_the_flattened_tensor() -> None:
    """Three rows of two numbers: the first process has two rows, the second one."""
    assert [flat_range((3, 2), rank, 2) for rank in (0, 1)] == [(0, 4), (4, 6)]
    part = Part(torch.tensor([5.0, 6.0]), (3, 2), 4)
    assert (part.begin, part.end) == (4, 6)
