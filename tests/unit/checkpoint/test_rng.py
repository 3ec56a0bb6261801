"""Random number generators: seeded, saved, put back and left alone."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from trlx_like.checkpoint import (
    isolated_rng,
    load_tree,
    rng_state,
    save_tree,
    seed_everything,
    set_rng_state,
)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class TestRng:
    def test_seeds_reach_every_generator(self) -> None:
        # First numbers of Mersenne twisters seeded with 0, as documented all over: random.seed(0), np.random.seed(0),
        # torch.manual_seed(0).
        with isolated_rng(0):
            assert draws() == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899), abs=1e-9)
        with isolated_rng(2**40 + 1):
            first = draws()
        with isolated_rng(2**40 + 1):
            assert draws() == first

    def test_state_through_a_file_gives_the_same_numbers(self, tmp_path: Path) -> None:
        seed_everything(7)
        random.gauss(0, 1)  # leaves half of a pair behind
        np.random.randn()
        save_tree(rng_state(), tmp_path / "rng")
        expected = [random.gauss(0, 1), float(np.random.randn()), *draws()]
        seed_everything(8)
        set_rng_state(load_tree(tmp_path / "rng"))
        assert [random.gauss(0, 1), float(np.random.randn()), *draws()] == expected

    def test_isolation_holds_when_the_block_raises(self) -> None:
        seed_everything(3)
        expected = draws()
        seed_everything(3)
        with pytest.raises(KeyError), isolated_rng(99):
            draws()
            raise KeyError
        assert draws() == expected

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_cuda_is_isolated_from_its_first_use_on(self) -> None:
        seed_everything(3)
        expected = torch.rand(4, device="cuda")
        torch.manual_seed(3)
        with isolated_rng(99):
            torch.rand(4, device="cuda")
        assert torch.equal(torch.rand(4, device="cuda"), expected)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_other_devices_than_there_were_are_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "trlx_like"):
            set_rng_state({**rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)]})
        assert "1 CUDA devices were saved and this machine has 0" in caplog.text
