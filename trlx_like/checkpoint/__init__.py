"""Checkpoints: what a run has to remember, written without pickle and published all at once or not at all.

`tree` writes nested state, `rng` gathers random number generators, `state` collects everything that is
stateful, `store` publishes and verifies folders. Names load on first use, so that looking for a checkpoint
imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trlx_like.checkpoint.rng import RngState, isolated_rng, rng_state, seed_everything, set_rng_state
    from trlx_like.checkpoint.state import Fields, Stateful, TrainState, fields
    from trlx_like.checkpoint.store import MANIFEST, CheckpointStore
    from trlx_like.checkpoint.tree import load_tree, save_tree

__all__ = [
    "MANIFEST",
    "CheckpointStore",
    "Fields",
    "RngState",
    "Stateful",
    "TrainState",
    "fields",
    "isolated_rng",
    "load_tree",
    "rng_state",
    "save_tree",
    "seed_everything",
    "set_rng_state",
]

_MODULES = {
    "rng": ("RngState", "isolated_rng", "rng_state", "seed_everything", "set_rng_state"),
    "state": ("Fields", "Stateful", "TrainState", "fields"),
    "store": ("MANIFEST", "CheckpointStore"),
    "tree": ("load_tree", "save_tree"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
