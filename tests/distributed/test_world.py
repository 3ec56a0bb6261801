"""Statistics over processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.contract.recipes import make
from tests.distributed.ranks import on_ranks
from trlx_like.distributed import Statistics, World


@pytest.mark.parametrize(
    ("values", "mask", "expected"),
    [
        ([1.0, 2.0, 6.0, 99.0], [1, 1, 1, 0], (3, 3.0, 14.0, 7.0)),
        ([5.0, 99.0], [1, 0], (1, 5.0, 0.0, 0.0)),
        ([99.0], [0], (0, 0.0, 0.0, 0.0)),
    ],
)
def test_statistics_by_hand(values: Sequence[float], mask: Sequence[int], expected: tuple[float, ...]) -> None:
    """Count, mean, sum of squared distances, and unbiased variance."""
    found = World(Accelerator(cpu=True)).statistics(torch.tensor(values), torch.tensor(mask).bool())
    assert found == Statistics(*expected[:3])
    assert found.var == expected[3]
    assert found.std == pytest.approx(expected[3] ** 0.5)


def moved(rank: int, folder: Path) -> bool:
    batch = torch.ones(3)
    return batch.to(make("SFTTrainer", folder).device).data_ptr() == batch.data_ptr()


def test_what_is_on_the_cpu_is_not_copied_to_it(tmp_path: Path) -> None:
    assert on_ranks(moved, tmp_path) == [True, True]
