"""Random numbers as a function of counters: every sample has a key, and its numbers depend on nothing else.

The integers are exact 64-bit arithmetic on tensors, which wraps around, so they are the same on every device. A sample
draws the same numbers alone and in any batch, on any process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64


def stream(*numbers: int) -> int:
    """Mix integers, such as a seed, a purpose and the number of a round, to the number of a stream of keys.

    Args:
        numbers: The integers; their order matters.

    Returns:
        A signed 64-bit integer.
    """
    state = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = _mix((state ^ _signed(number % _WORD)) + _signed(_STEP))
    return int(state)


def random_stream() -> int:
    """Draw the number of a stream with torch's global generator."""
    limits = torch.iinfo(torch.int64)
    return int(torch.randint(limits.min, limits.max, ()))


def keys(of: int, numbers: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of each sample of a stream, from which its random numbers follow.

    Args:
        of: The stream.
        numbers: The number of each sample in the stream. [B]
        device: The device of the result.

    Returns:
        The keys. [B] int64
    """
    counts = torch.as_tensor(numbers, dtype=torch.int64, device=device)
    return _mix(counts.add(1).mul_(_signed(_STEP)).add_(of))


def integers(key: Tensor, count: int, start: int = 0) -> Tensor:
    """Return random 64-bit integers: mix(key + (position + 1) g), with g = 2^64 / golden ratio, modulo 2^64.

    Source: SplitMix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", fig. 17, with the
    constants of Stafford's variant 13. It is a counter-based generator: any position can be computed on its own.

    Args:
        key: The key of each row. [B] int64
        count: The number of positions, T.
        start: The first position.

    Returns:
        The integers. [B, T] int64
    """
    positions = torch.arange(start + 1, start + count + 1, device=key.device)
    return _mix(positions.mul_(_signed(_STEP)) + key[:, None])


def uniforms(key: Tensor, count: int, start: int = 0) -> Tensor:
    """Return random numbers in [0, 1): the upper 53 bits of `integers`, divided by 2^53.

    The arguments are those of `integers`. Shapes: [B] -> [B, T] float64.
    """
    return _shifted(integers(key, count, start), 11).double().mul_(2.0**-53)


def normals(key: Tensor, count: int) -> Tensor:
    """Return standard normal numbers: sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v).

    Source: Box and Muller 1958, "A note on the generation of random normal deviates". u and v are the upper and the
    lower 32 bits of one integer, so no number is above 6.8.

    Args:
        key: The key of each row. [B] int64
        count: Numbers per row, N.

    Returns:
        The numbers. [B, N] float32
    """
    bits = integers(key, (count + 1) // 2)
    radius = _shifted(bits, 32).float().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_(0xFFFFFFFF).float().mul_(2 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def orders(key: Tensor, count: int) -> Tensor:
    """Return a random order of 0, ..., count - 1 for each key: that of its `integers`. Shapes: [B] -> [B, N]."""
    return integers(key, count).argsort(dim=1)


def _mix(bits: Tensor) -> Tensor:
    """Mix the bits of integers, in place."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift integers to the right without their sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """Return the int64 with the same bits."""
    return bits - _WORD if bits >= _WORD // 2 else bits
