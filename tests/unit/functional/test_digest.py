"""Digests of tensors: the same for the same bits, and for nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trlx_like.functional import digest as module
from trlx_like.functional.digest import digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def twin(bits: np.ndarray) -> tuple[int, int]:
    """Both sums in numpy, with integers that wrap around."""
    weights = module._weights(torch.device("cpu")).numpy()
    bits = bits.astype(np.int64)
    columns = len(weights)
    with np.errstate(over="ignore"):
        total = int(bits.sum())
        while len(bits) > columns:
            rows = [bits[start : start + columns] for start in range(0, len(bits), columns)]
            bits = np.array([(row * weights[: len(row)]).sum() for row in rows], dtype=np.int64)
        return int((bits * weights[: len(bits)]).sum()), total


def test_by_hand() -> None:
    """1.0 is 0x3f800000 and 2.0 is 0x40000000 as float32; the sum of both is 2139095040, in either order."""
    one, other = digest(torch.tensor([1.0, 2.0])), digest(torch.tensor([2.0, 1.0]))
    assert one.kind == "float32 [2]"
    assert one.unordered == other.unordered == 0x3F800000 + 0x40000000 == 2139095040
    assert one.ordered != other.ordered
    first, second = module._weights(torch.device("cpu"))[:2].tolist()
    assert (one.ordered - (0x3F800000 * first + 0x40000000 * second)) % 2**64 == 0


def test_digests_are_the_same_in_every_process_and_release() -> None:
    """Taken once; an engine with another release of this library has to agree. A gradient is no part of a tensor."""
    weights = module._weights(torch.device("cpu"))
    assert weights[:2].tolist() == [1625726227214854619, 7336523290696244447] and len(weights) == 1 << 14
    values = torch.arange(5.0, requires_grad=True)
    assert digest(values) == module.Digest("float32 [5]", 795123996994568192, 4299161600)


@pytest.mark.parametrize("size", [0, 1, 5, 1 << 14, (1 << 14) + 1, 5 << 14, 300_000])
def test_it_is_the_sum_that_numpy_makes(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    found = digest(values)
    ordered, unordered = twin(values.numpy().view(np.int32))
    assert ((found.ordered - ordered) % 2**64, (found.unordered - unordered) % 2**64) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 40_000))
def test_one_changed_number_and_two_that_trade_places_show(dtype: torch.dtype, seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(size, generator=generator) * 100).abs().to(dtype)
    one, other = torch.randperm(size, generator=generator)[:2].tolist()
    before = digest(values)
    assert digest(values.clone()) == before
    swapped = values.clone()
    swapped[[one, other]] = values[[other, one]]
    assert (digest(swapped) == before) == torch.equal(swapped, values)
    assert digest(swapped).unordered == before.unordered
    changed = values.clone()
    changed[one] = not values[one] if dtype == torch.bool else values[one] + 1
    assert (digest(changed) == before) == torch.equal(changed, values)


def test_neighbours_in_bfloat16_that_trade_places_show() -> None:
    """Rows that are one unit of the last place apart: no tolerance would see it."""
    rows = torch.full((3, 4), 1.0).bfloat16()
    rows[1] = 1.0078125  # 1 + 2^-7, the next one
    assert torch.allclose(rows[0].float(), rows[1].float(), rtol=2**-7)
    assert digest(rows[[1, 0, 2]]) != digest(rows)


def test_shape_and_type_are_part_of_it() -> None:
    ones = torch.ones(2, 3)
    found = {digest(values) for values in (ones, ones.T, ones.flatten(), ones.bfloat16(), ones.bfloat16().double())}
    assert len(found) == 5
    assert digest(torch.arange(6.0).reshape(2, 3).T) == digest(torch.arange(6.0).reshape(2, 3).T.contiguous())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
