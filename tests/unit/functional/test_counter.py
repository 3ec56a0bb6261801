"""Counter-based random numbers: those of the published generator, the same alone and in a batch, and random."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from trlx_like.functional.counter import integers, keys, normals, orders, random_stream, stream, uniforms

WORD = 1 << 64
STEP = 0x9E3779B97F4A7C15
INT64 = st.integers(-(2**63), 2**63 - 1)


def twin(state: int) -> int:
    """SplitMix64's output function in Python's unbounded integers."""
    state %= WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


def unmixed(bits: int) -> int:
    """The integer whose `twin` is the given one."""
    for by, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        bits = (bits ^ (bits >> by) ^ (bits >> 2 * by)) % WORD
        bits = bits * pow(factor, -1, WORD) % WORD
    return bits


def signed(bits: int) -> int:
    return (bits + 2**63) % WORD - 2**63


def word(key: int, position: int) -> int:
    return twin(key + (position + 1) * STEP)


def test_golden() -> None:
    """The first outputs of SplitMix64 from the seeds 0 and 1234567, as published with the xoshiro generators."""
    got = integers(torch.tensor([0, 1234567]), 3)
    words = [[int(n) % WORD for n in row] for row in got.tolist()]
    assert words[0] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert words[1] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert uniforms(torch.tensor([0]), 1).item() == (0xE220A8397B1DCDAF >> 11) / 2**53
    assert stream() == 0 and stream(1) != stream(1, 0) != stream(0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(INT64, min_size=1, max_size=4), st.integers(0, 10**12), st.integers(1, 5))
def test_every_position_on_its_own(given_keys: list[int], start: int, count: int) -> None:
    got = integers(torch.tensor(given_keys), count, start)
    assert [[n % WORD for n in row] for row in got.tolist()] == [
        [word(key, start + place) for place in range(count)] for key in given_keys
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(INT64, st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(1, 9))
def test_a_sample_draws_the_same_alone_and_in_any_batch(of: int, numbers: list[int], count: int) -> None:
    together = keys(of, numbers)
    for row, number in enumerate(numbers):
        alone = keys(of, [number])
        assert alone.item() == together[row].item()
        for draw in (uniforms, normals, orders):
            assert torch.equal(draw(alone, count)[0], draw(together, count)[row])
    assert torch.equal(uniforms(together, count, 3), uniforms(together, count + 3)[:, 3:])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(INT64, max_size=4), st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_streams_and_keys_are_mixed_as_written(numbers: list[int], samples: list[int]) -> None:
    state = 0
    for number in numbers:
        state = twin((state ^ number % WORD) + STEP)
    assert stream(*numbers) == signed(state)
    assert keys(stream(*numbers), samples).tolist() == [signed(word(state, sample)) for sample in samples]


@pytest.mark.parametrize("number", [-1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 7 * 2**60])
def test_numbers_of_a_stream_count_as_64_bits(number: int) -> None:
    assert stream(number) == signed(twin(number % WORD + STEP)) == stream(number + WORD)


def test_the_smallest_signed_integer_is_a_stream() -> None:
    assert twin(unmixed(12345)) == 12345
    assert stream(unmixed(2**63) - STEP) == -(2**63)


def test_normal_numbers_of_chosen_words() -> None:
    """Of words with u = .5 / 2^32 (the largest number), 1.5 / 2^32, and middling ones, by the formula in float64."""
    words = [5 << 30, (1 << 32) + (1 << 31), 0x9ABCDEF012345678, 0x7000000080000001]
    for at_first in words:
        key = (unmixed(at_first) - STEP) % WORD
        both = [at_first, word(key, 1)]
        radii = [math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32)) for bits in both]
        angles = [2 * math.pi * (bits % 2**32) / 2**32 for bits in both]
        cosines = [radius * math.cos(angle) for radius, angle in zip(radii, angles, strict=True)]
        sines = [radius * math.sin(angle) for radius, angle in zip(radii, angles, strict=True)]
        got = normals(torch.tensor([signed(key)]), 4)
        assert got[0].tolist() == pytest.approx([*cosines, *sines], abs=3e-6)
        assert normals(torch.tensor([signed(key)]), 3)[0].tolist() == got[0, :3].tolist()


def chi_square(counts: Tensor) -> float:
    """The statistic of equal counts in standard deviations from its mean, by Wilson and Hilferty's transformation."""
    freedom, expected = counts.numel() - 1, float(counts.sum()) / counts.numel()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("side", ["positions", "samples", "rounds"])
def test_numbers_are_uniform_and_neighbours_independent(side: str) -> None:
    """A quarter of a million numbers, one after the other along positions, samples or rounds, and pairs of them."""
    if side == "positions":
        numbers = uniforms(keys(stream(1, 0, 0), range(4)), 1 << 16)
    elif side == "samples":
        numbers = uniforms(keys(stream(1, 0, 0), range(1 << 16)), 4).T
    else:
        first = torch.tensor([keys(stream(1, 0, number), [0]).item() for number in range(1 << 12)])
        numbers = uniforms(first, 64).T
    flat = numbers.reshape(-1)
    assert float(flat.min()) >= 0 and float(flat.max()) < 1
    cells = (numbers * 32).long()
    pairs = cells[:, :-1] * 32 + cells[:, 1:]
    assert abs(chi_square(torch.bincount(cells.reshape(-1), minlength=32).double())) < 4
    assert abs(chi_square(torch.bincount(pairs.reshape(-1), minlength=1024).double())) < 4
    steps = torch.arange(1, len(flat) + 1) / len(flat)
    assert float((flat.sort().values - steps).abs().max()) * len(flat) ** 0.5 < 1.95  # Kolmogorov-Smirnov at 0.1 %
    bits = (numbers.reshape(-1) * 2**53).long()
    ones = torch.stack([(bits >> bit & 1).double().mean() for bit in range(53)])
    assert float((ones - 0.5).abs().max()) < 5 * 0.5 / len(flat) ** 0.5


def test_normal_numbers_are_normal() -> None:
    """By their distribution function, and both halves of a pair are independent."""
    numbers = normals(keys(stream(2), range(64)), 4096).double()
    flat = numbers.reshape(-1)
    steps = torch.arange(1, len(flat) + 1) / len(flat)
    exact = 0.5 * (1 + torch.erf(flat.sort().values / math.sqrt(2)))
    assert float((exact - steps).abs().max()) * len(flat) ** 0.5 < 1.95
    cosine, sine = numbers.chunk(2, dim=1)
    for left, right in ((cosine, sine), (cosine.abs(), sine.abs()), (flat[:-1], flat[1:])):
        assert abs(float(torch.corrcoef(torch.stack([left.reshape(-1), right.reshape(-1)]))[0, 1])) < 0.01
    assert normals(torch.tensor([7]), 3).shape == (1, 3)
    assert normals(torch.tensor([7]), 3).isfinite().all()


def test_orders_are_permutations_and_all_are_likely() -> None:
    got = orders(keys(stream(3), range(6000)), 3)
    assert bool((got.sort(dim=1).values == torch.arange(3)).all())
    codes = got @ torch.tensor([9, 3, 1])
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 6
    assert abs(chi_square(counts.double())) < 4


def test_a_random_stream_comes_from_torch() -> None:
    torch.manual_seed(5)
    first, second = random_stream(), random_stream()
    torch.manual_seed(5)
    assert (random_stream(), random_stream()) == (first, second) != (second, first)
