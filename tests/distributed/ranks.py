"""Several processes that know of each other, forked from the test, and tensors that are divided over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from trlx_like.functional.parts import Part
from trlx_like.testing.ranks import on_ranks as on_ranks

# A process that has started threads of OpenMP cannot be forked.
torch.set_num_threads(1)


def whole(backend: Any, tree: Any) -> Any:
    """A state dict with whole tensors in place of `Part`s. All processes call it."""
    if isinstance(tree, Part):
        pieces = dict(backend.world.gather([(tree.begin, tree.values.cpu())] if tree.values.numel() else []))
        return torch.cat([pieces[begin] for begin in sorted(pieces)]).view(tree.shape)
    if isinstance(tree, dict):
        return type(tree)((name, whole(backend, value)) for name, value in tree.items())
    return [whole(backend, value) for value in tree] if isinstance(tree, list) else tree


def on_two_machines(changes: Mapping[str, Any]) -> None:
    """Let half of the processes seem to be on another machine, if weights are divided within a machine."""
    if changes.get("backend.shard") == "hybrid":
        os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // 2)
