"""The random number generators of a process: Python's, numpy's global one, and torch's on every device."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("trlx_like")

_cuda: Any = torch.cuda  # some of its functions are untyped


def seed_everything(seed: int) -> None:
    """Seed all random number generators of this process.

    Args:
        seed: The seed. Numpy accepts 32 bits and gets the lower ones.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds CUDA and MPS too


def rng_state() -> dict[str, Any]:
    """Return the state of all random number generators of this process, in a form that `save_tree` can write.

    Returns:
        A state for each of "python", "numpy", "torch", "cuda" and "mps". "cuda" is a list with one state per device,
        empty if the process has not used CUDA yet; "mps" is None without such a device.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": _cuda.get_rng_state_all() if _cuda.is_initialized() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned. If the number of CUDA devices has changed, it warns and restores what it can.

    Args:
        state: The saved state.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        devices, saved = torch.cuda.device_count(), len(state["cuda"])
        if devices != saved:
            logger.warning(
                "The random states of %d CUDA devices were saved and this machine has %d: the run continues, but "
                "not with the numbers that it would have drawn there.",
                saved,
                devices,
            )
        for device, of_device in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(of_device, device)
    elif torch.cuda.is_available():
        # If CUDA is initialised later, its generators start from the seed that the CPU state contains.
        torch.cuda.manual_seed_all(torch.initial_seed())
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run a block with newly seeded generators, and restore all of them afterwards, even after an exception.

    Args:
        seed: The seed within the block.
    """
    before = rng_state()
    try:
        seed_everything(seed)
        yield
    finally:
        set_rng_state(before)


class RngState:
    """Save and restore all random number generators of this process, as an item for `TrainState.register`."""

    state_dict = staticmethod(rng_state)
    load_state_dict = staticmethod(set_rng_state)
