"""Checkpoints: the complete state of a run, written without pickle and published atomically.

`tree` writes nested state, `rng` collects random number generators, `state` collects everything stateful, `manifest`
hashes and verifies folders, `store` publishes them. Names are imported on first use, so that looking for a checkpoint
imports no torch; type checkers and editors read them in `__init__.pyi`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "manifest": "MANIFEST",
    "rng": "RngState isolated_rng rng_state seed_everything set_rng_state",
    "state": "Fields Stateful TrainState fields",
    "store": "CheckpointStore",
    "tree": "load_tree save_tree",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
