"""Checksums of tensors, to compare two tensors without having both in one place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_COLUMNS = 1 << 14  # numbers in a row
_ROWS = {"cpu": 4}  # rows per step, so that temporaries fit in a CPU core's cache; GPUs prefer many rows
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digest:
    """Hold the checksum of a tensor. Tensors of equal dtype, shape and bits have equal digests."""

    kind: str  # dtype and shape
    ordered: int  # changes if a number changes or two numbers are swapped
    unordered: int  # changes if a number changes, not if numbers are swapped


def digest(values: Tensor) -> Digest:
    """Compute the checksum of a tensor: sum_i b_i w_i modulo 2^64, and sum_i b_i.

    b_i are the bits of the i-th number read as an integer, w_i is an odd random integer.

    Source: multilinear hashing, Carter and Wegman 1979, "Universal classes of hash functions", sec. 3. A change of one
    number always changes the digest, since an odd factor is invertible; other changes go unnoticed with a probability
    of about 2^-32. The arithmetic is exact, so all devices and all orders of summation agree.

    Args:
        values: A tensor of any dtype and shape. [*]

    Returns:
        The digest, which is a few Python numbers.
    """
    kind = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    numbers = values.detach().contiguous().flatten()
    bits = numbers.to(torch.uint8) if numbers.dtype == torch.bool else numbers.view(_BITS[numbers.element_size()])
    ordered, unordered = _sums(bits)
    return Digest(kind, ordered, unordered)


def _sums(bits: Tensor) -> tuple[int, int]:
    """Compute both sums over integers [N]; the ordered sum of many rows hashes the sums of the rows."""
    weights = _weights(bits.device)  # [C]
    if len(bits) <= _COLUMNS:
        row = bits.long()
        return int((row * weights[: len(row)]).sum()), int(row.sum())
    whole = len(bits) // _COLUMNS * _COLUMNS
    parts: list[Tensor] = []  # each [2, rows at once]
    for block in bits[:whole].view(-1, _COLUMNS).split(_ROWS.get(bits.device.type, 1024)):
        wide = block.long()
        parts.append(torch.stack([(wide * weights).sum(dim=1), wide.sum(dim=1)]))
    rest = bits[whole:].long()
    parts.append(torch.stack([(rest * weights[: len(rest)]).sum(), rest.sum()])[:, None])
    ordered, unordered = torch.cat(parts, dim=1)
    return _sums(ordered)[0], int(unordered.sum())


@lru_cache
def _weights(device: torch.device) -> Tensor:
    """Make the odd random 64-bit factors, which are the same on every device. [_COLUMNS]"""
    generator = torch.Generator().manual_seed(20)
    low = torch.iinfo(torch.int64).min
    return torch.randint(low, -low - 1, (_COLUMNS,), generator=generator).bitwise_or(1).to(device)
