"""Masked sums, moments and whitening."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import LAYOUTS, NUMBERS, QUICK, Batch, Layout, batches
from trlx_like.functional import masked

NAN, INF = float("nan"), float("inf")

# Real places of X: 2, 4, 6. Sum 12; mean 4; m2 = 4 + 0 + 4 = 8; unbiased variance 8 / 2 = 4.
X = torch.tensor([[2.0, 4.0, NAN], [6.0, INF, -INF]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_zero_padding_selects() -> None:
    assert masked.zero_padding(X, MASK).tolist() == [[2, 4, 0], [6, 0, 0]]


def whitened(x: Tensor, mask: Tensor, center: bool = True) -> Tensor:
    count, mean, m2 = masked.masked_stats(x, mask)
    return masked.whiten(x, mask, mean, masked.unbiased_variance(count, m2), center)


def test_sum_of_real_places() -> None:
    assert masked.masked_sum(X, MASK).item() == 12
    assert masked.masked_sum(X, torch.zeros_like(MASK)).item() == 0


def test_stats_golden() -> None:
    count, mean, m2 = masked.masked_stats(X, MASK)
    assert (count.item(), mean.item(), m2.item()) == (3, 4, 8)
    assert masked.unbiased_variance(count, m2).item() == 4


def test_stats_of_integers_and_half_precision_are_float32() -> None:
    # bfloat16 holds 256 and 258 but not 257, their mean.
    for dtype in (torch.bfloat16, torch.int64):
        _, mean, m2 = masked.masked_stats(torch.tensor([256, 258], dtype=dtype), torch.tensor([True, True]))
        assert (mean.dtype, mean.item(), m2.item()) == (torch.float32, 257, 2)


def test_combine_stats_golden() -> None:
    # {2, 4}: n 2, mean 3, m2 2. {6}: n 1, mean 6, m2 0. The third is empty.
    # Together n 3, mean 4, m2 = 2 + 2 * (3 - 4)^2 + 1 * (6 - 4)^2 = 8.
    merged = masked.combine_stats(torch.tensor([[2.0, 3.0, 2.0], [1.0, 6.0, 0.0], [0.0, 0.0, 0.0]]))
    assert [m.item() for m in merged] == [3, 4, 8]
    assert [m.item() for m in masked.combine_stats(torch.zeros(2, 3))] == [0, 0, 0]


def test_whiten_golden() -> None:
    # (2, 4, 6 - mean 4) / std 2; uncentred, the mean 4 is added again.
    centred = whitened(X, MASK)
    torch.testing.assert_close(centred, torch.tensor([[-1.0, 0, 0], [1, 0, 0]]))
    scaled = whitened(X, MASK, center=False)
    torch.testing.assert_close(scaled, torch.tensor([[3.0, 4, 0], [5, 0, 0]]))


def test_values_are_centred_unless_told_otherwise() -> None:
    mean, variance = torch.tensor(2.0), torch.tensor(1.0)
    assert masked.whiten(torch.tensor([2.0]), torch.tensor([True]), mean, variance).item() == 0


@pytest.mark.parametrize(("center", "expected"), [(True, 0.0), (False, 7.0)])
def test_one_value_is_whitened_without_nan(center: bool, expected: float) -> None:
    mask = torch.tensor([False, True, False])
    assert whitened(torch.tensor([NAN, 7.0, NAN]), mask, center).tolist() == [0, expected, 0]
    assert masked.unbiased_variance(torch.tensor(1.0), torch.tensor(0.0)).item() == 0


@pytest.mark.parametrize("junk", [NAN, INF, 1e30])
@pytest.mark.parametrize("function", [masked.zero_padding, masked.masked_sum, whitened])
def test_gradients_at_padding_are_exactly_zero(function: Callable[[Tensor, Tensor], Tensor], junk: float) -> None:
    gradients = []
    for value in (junk, 0.0):
        x = torch.tensor([1.0, 2.0, 5.0, value], requires_grad=True)
        result = function(x, torch.tensor([True, True, True, False]))
        (result * torch.tensor([1.0, 3.0, 2.0, 7.0])).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0][3] == 0 and gradients[0][:3].abs().sum() > 0


@QUICK
@given(batches(1), st.booleans())
def test_equals_numpy(batch: Batch, center: bool) -> None:
    (x,), mask = batch.fields, batch.mask
    x_np, mask_np = batch.numpy()
    values = reference.real_values(x_np, mask_np)
    torch.testing.assert_close(masked.masked_sum(x, mask).item(), float(np.sum(values)))
    got = [s.item() for s in masked.masked_stats(x, mask)]
    np.testing.assert_allclose(got, reference.stats(values), atol=1e-12)
    white = whitened(x, mask, center)
    # The spread of nearly equal values is rounding, times 1e4: hence the absolute tolerance.
    np.testing.assert_allclose(white.numpy(), reference.whiten(x_np, mask_np, center), rtol=1e-6, atol=1e-8)


@QUICK
@given(batches(1), LAYOUTS, st.booleans())
def test_padding_changes_nothing(batch: Batch, layout: Layout, center: bool) -> None:
    other = layout(batch)
    (x,), (y,) = batch.fields, other.fields
    torch.testing.assert_close(masked.masked_sum(y, other.mask), masked.masked_sum(x, batch.mask))
    torch.testing.assert_close(masked.masked_stats(y, other.mask), masked.masked_stats(x, batch.mask))
    white, other_white = (whitened(b.fields[0], b.mask, center) for b in (batch, other))
    torch.testing.assert_close(other_white[other.mask], white[batch.mask], rtol=1e-6, atol=1e-8)
    assert (other_white[~other.mask] == 0).all()


@QUICK
@given(st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=4))
def test_merged_groups_are_the_whole(groups: list[list[float]]) -> None:
    rows = []
    for group in groups:
        x = torch.tensor(group, dtype=torch.float64)
        rows.append(torch.stack(masked.masked_stats(x, torch.ones_like(x, dtype=torch.bool))))
    merged = [m.item() for m in masked.combine_stats(torch.stack(rows))]
    np.testing.assert_allclose(merged, reference.stats([v for group in groups for v in group]), atol=1e-12)
