"""A few numbers in the place of a tensor, to tell whether two are the same without having both in one place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_COLUMNS = 1 << 14  # numbers of a row
_ROWS = {"cpu": 4}  # rows at once, so that what is in between stays in a core's cache; elsewhere the more the better
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digest:
    """Equal for tensors of one type and shape whose numbers are equal, bit by bit and place by place."""

    kind: str  # type and shape
    ordered: int  # changes with any one number, and with any two that trade places
    unordered: int  # only changes with the numbers


def digest(values: Tensor) -> Digest:
    """sum_i b_i w_i modulo 2^64 and sum_i b_i, b_i the bits of the i-th number as an integer, w_i odd and random.

    A multilinear hash (Carter & Wegman 1979, "Universal classes of hash functions", sec. 3): one changed number always
    shows, since an odd factor has an inverse; any other change escapes with a probability of about 2^-32. In exact
    integers, so it is the same on every device and for any order of summation. values: [*]
    """
    kind = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    numbers = values.detach().contiguous().flatten()
    bits = numbers.to(torch.uint8) if numbers.dtype == torch.bool else numbers.view(_BITS[numbers.element_size()])
    ordered, unordered = _sums(bits)
    return Digest(kind, ordered, unordered)


def _sums(bits: Tensor) -> tuple[int, int]:
    """Both sums over integers [N]; of more than a row, the sums of the rows' sums."""
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
    """Odd numbers of 64 bits, the same on every device. [_COLUMNS]"""
    generator = torch.Generator().manual_seed(20)
    low = torch.iinfo(torch.int64).min
    return torch.randint(low, -low - 1, (_COLUMNS,), generator=generator).bitwise_or(1).to(device)
