"""Parts of tensors: the rows that `torch.chunk` gives to each process."""

from __future__ import annotations

import pytest
import torch

from trlx_like.functional.parts import Part, Saved, flat_range, row_range, unread


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
    assert part.writes


def test_a_part_finds_its_numbers_in_other_tensors() -> None:
    """In a whole tensor, in a larger part of one, and in one that is read from a file."""
    whole = torch.arange(10.0).view(5, 2)
    part = Part(torch.zeros(3), (5, 2), 5)
    asked = []

    def read(begin: int, end: int) -> torch.Tensor:
        asked.append((begin, end))
        return whole.flatten()[begin:end]

    for other in (whole, Part(torch.arange(3.0, 9.0), (5, 2), 3), Saved((5, 2), read)):
        assert part.like(other).tolist() == [5, 6, 7]
    assert asked == [(5, 8)]


def test_a_weight_that_is_not_read_yet_is_zero_and_trained() -> None:
    made = unread(Saved((5, 2), lambda begin, end: torch.ones(end - begin)), torch.bfloat16)
    assert made.requires_grad and made.dtype == torch.bfloat16
    assert made.tolist() == [[0, 0]] * 5 and made.untyped_storage().nbytes() == 2
    assert not unread(made.saved, torch.float32, requires_grad=False).requires_grad
