"""The random numbers a run draws: python `random`, numpy's global generator, torch on every device."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("trlx_like")

_cuda: Any = torch.cuda  # some of its functions have no types


def seed_everything(seed: int) -> None:
    """Seeds all of them. Numpy takes 32 bits and gets the lower ones."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA and MPS too


def rng_state() -> dict[str, Any]:
    """The state of all of them, as a tree that `save_tree` can write.

    `cuda` has one state a device, and is empty as long as the process has not used CUDA.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": _cuda.get_rng_state_all() if _cuda.is_initialized() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` returned. If the devices have changed it warns and restores what it can."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        _set_cuda(state["cuda"])
    else:
        # CUDA that comes up later starts from the last `torch.manual_seed`. The CPU state has its seed.
        torch.cuda.manual_seed_all(torch.initial_seed())
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _set_cuda(states: list[torch.Tensor]) -> None:
    devices = torch.cuda.device_count()
    if devices != len(states):
        logger.warning(
            "The random states of %d CUDA devices were saved and this machine has %d: the run continues, but "
            "not with the numbers that it would have drawn there.",
            len(states),
            devices,
        )
    for device, state in enumerate(states[:devices]):
        torch.cuda.set_rng_state(state, device)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Runs a block with its own seeds, and puts every generator back afterwards, whatever the block raises."""
    before = rng_state()
    try:
        seed_everything(seed)
        yield
    finally:
        set_rng_state(before)


class RngState:
    """All generators of this process, to be registered with a `TrainState`."""

    def state_dict(self) -> dict[str, Any]:
        return rng_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_rng_state(state)
