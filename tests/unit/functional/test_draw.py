"""Drawing tokens: by hand for given random numbers, as often as they are likely, and never what is impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from trlx_like.functional.counter import keys, stream, uniforms
from trlx_like.functional.draw import draw


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_golden() -> None:
    """Sums are .25, .25, .75, 1: u below .25 is token 0, up to .75 token 2, then 3; token 1 has no room."""
    numbers = column(0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)
    assert draw(torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 6), numbers).tolist() == [[0], [0], [2], [2], [3], [3]]


@given(
    weights=st.lists(st.floats(0, 2**100, width=32), min_size=1, max_size=9).filter(any),
    u=st.sampled_from([1 - 2**-53, 1 - 2**-52, 0.5]) | st.floats(0, 1, exclude_max=True),
    after=st.integers(0, 2),
)
@example(weights=[0.0, 1.0], u=1 - 2**-53, after=1)
@example(weights=[0.3, 0.2], u=1 - 2**-53, after=1)
def test_only_what_has_room_is_drawn(weights: list[float], u: float, after: int) -> None:
    """The largest number below 1 too, times a sum that may not be 1, stays below the sum."""
    rows: Tensor = torch.tensor([weights + [0.0] * after])
    sums, token = rows.double().cumsum(dim=1)[0].tolist(), int(draw(rows, column(u)))
    below = sums[token - 1] if token else 0.0
    assert below <= u * sums[-1] < sums[token] and rows[0, token] > 0


def test_each_row_for_itself_and_as_often_as_it_is_likely() -> None:
    numbers = uniforms(keys(stream(0), range(80_000)), 1)
    rows = torch.tensor([[0.1, 0.0, 0.6, 0.3], [2.0, 1.0, 1.0, 0.0]])  # the second adds up to 4
    drawn = draw(rows.repeat_interleave(40_000, dim=0), numbers).view(2, -1)
    shares = torch.stack([(drawn == token).float().mean(dim=1) for token in range(4)], dim=1)
    # The standard error of a share is at most .0025.
    torch.testing.assert_close(shares, torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.5, 0.25, 0.25, 0.0]]), atol=0.01, rtol=0)
    assert shares[0, 1] == shares[1, 3] == 0


def test_rare_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    """100,000 tokens of 1e-9 each come after one that has the rest: together 1e-4, which float32 sums lose."""
    rare: Tensor = torch.full((1, 100_001), 1e-9)
    rare[0, 0] = 1 - 1e-4
    assert abs(int(draw(rare, column(1 - 0.5e-4))) - 50_000) < 100  # the middle of the rare ones


def test_no_distribution_is_loud() -> None:
    scores: Any = torch.zeros(2, 3)
    with pytest.raises((RuntimeError, IndexError)):
        scores.scatter_(1, draw(torch.full((2, 3), torch.nan), column(0.2, 0.8)), 1.0)
