"""Checkpoints: the complete state of a run, written without pickle and published atomically.

`tree` writes nested state, `rng` collects random number generators, `state` collects everything stateful, `manifest`
hashes and verifies folders, `store` publishes them. Names are imported on first use, so that looking for a checkpoint
imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trlx_like.checkpoint.manifest import MANIFEST
    from trlx_like.checkpoint.rng import RngState, isolated_rng, rng_state, seed_everything, set_rng_state
    from trlx_like.checkpoint.state import Fields, Stateful, TrainState, fields
    from trlx_like.checkpoint.store import CheckpointStore
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
    "manifest": ("MANIFEST",),
    "rng": ("RngState", "isolated_rng", "rng_state", "seed_everything", "set_rng_state"),
    "state": ("Fields", "Stateful", "TrainState", "fields"),
    "store": ("CheckpointStore",),
    "tree": ("load_tree", "save_tree"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
