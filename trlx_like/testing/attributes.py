"""Find what changes while a trainer trains and is in no checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from trlx_like.checkpoint import Fields
from trlx_like.trainers.callbacks import Callback

# Attributes that change and need no saving.
NOT_STATE = {
    ".callbacks",  # the caller's
    ".agreement.canary.before",  # of the last round, for the words of an error
    ".run.clock",  # seconds of this process
    ".run.tracker",  # files and connections, opened anew; what finds them again is in `progress.tracker`
    ".run.folder.resumed",  # of this process
    ".run.folder.files",  # the list is a file of the run folder
    ".run.folder.saving",  # of the checkpoints of this process
    ".run.stop_request",  # of this process
    ".run.state",  # what is saved
    ".prompts._drawn",  # follows from the epoch and the seed
    ".store.epoch",  # told again when a resumed run skips the batches that it has done
    ".sampler.engine.steps",  # recorded by this process; a replayed one has the bits of the one that it replaces
    ".store.rows",  # of the batch before, for the ledger
    ".last_metrics",  # what `learn` returns; nothing reads it to train
    ".round_steps",  # follows from the store and the configuration
    ".rollouts.samples",  # of the round, for its metrics
    ".rollouts.faults",
    ".rollouts.prompts",
    ".rollouts.taken",
    ".sampler.engine.lm",  # brought up to date before it is used
    ".sampler.engine.version",  # the same
    ".rollouts.extreme",
    ".rollouts.warned",  # once in a process
    ".divergence_watch._warned",
    ".divergence_watch.optimisation",  # looked at as the trainer's own
    ".optimisation.guard._copies",  # of the last step, to undo it
    *(".optimisation.guard._known", ".optimisation.guard._weights", ".optimisation.guard._moments"),  # looked up again
    *(".by_hand.sampler", ".replay.rollouts"),  # looked at as the trainer's own
    ".rollouts.scoring",  # looked at as the trainer's own
}
# Gone by every step boundary: between two steps a step is half done.
BETWEEN_STEPS = {"._pending"}


def contents(trainer: Any) -> dict[str, Any]:
    """Describe everything that hangs on a trainer and is not saved: numbers, text and digests of tensors, by place."""
    saved = {id(trainer.config)}  # the caller's; saving a model notes its class in the model's own configuration
    names: set[tuple[int, str]] = set()
    for kept in trainer.state.items.values():
        if isinstance(kept.item, Fields):
            names |= {(id(kept.item.owner), name) for name in kept.item.names}
        else:
            saved.add(id(kept.item))
        if isinstance(kept.item, nn.Module):
            saved |= {id(part) for part in (*kept.item.modules(), *kept.item.parameters(), *kept.item.buffers())}
    ours = {"trlx_like", *(kind.__module__.split(".")[0] for kind in type(trainer).__mro__[:-1])}
    # Every part holds the run, or a part of it, which is looked at once.
    of_run = {id(part) for part in (trainer.run, *vars(trainer.run).values())}
    return {
        **dict(_walk(trainer, "", saved | of_run, names, ours)),
        **dict(_walk(trainer.run, ".run", saved, names, ours)),
    }


def _walk(
    value: Any, place: str, seen: set[int], names: set[tuple[int, str]], ours: Collection[str]
) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or place in NOT_STATE | BETWEEN_STEPS:
        return
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        yield place, value
    elif isinstance(value, torch.Tensor):
        yield place, hashlib.sha256(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    elif isinstance(value, torch.Generator):
        yield from _walk(value.get_state(), place, seen, names, ours)
    elif isinstance(value, random.Random | np.random.Generator):
        yield place, repr(value.getstate() if isinstance(value, random.Random) else value.bit_generator.state)
    elif isinstance(value, nn.Module):
        seen = seen | {id(value)}
        for name, entry in value.state_dict(keep_vars=True).items():
            yield from _walk(entry, f"{place}.{name}", seen, names, ours)
    else:
        parts = _parts(value, ours)
        if parts is not None:
            yield f"{place}#", len(parts)
            for name, part in parts.items():
                if (id(value), name) not in names:
                    yield from _walk(part, f"{place}.{name}", seen | {id(value)}, names, ours)


def _parts(value: Any, ours: Collection[str]) -> Mapping[str, Any] | None:
    """Return the parts of plain containers, and of objects of the packages `ours`; others look after their own."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {str(row): item for row, item in enumerate(value)}
    if type(value).__module__.split(".")[0] in ours or dataclasses.is_dataclass(value):
        return getattr(value, "__dict__", None)
    return None


class Watch(Callback):
    """Keep what hangs on the trainer at every step boundary."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.seen.append(contents(trainer))


def changing(seen: list[dict[str, Any]], allowed: Collection[str] = ()) -> set[str]:
    """Return the places that differ between any two of the given contents of a trainer.

    Args:
        seen: The contents at several step boundaries, as `Watch` keeps them.
        allowed: Attributes that may differ, each with a dot before its name, and what hangs on them.
    """
    first = seen[0]
    found = {key for one in seen[1:] for key in {*first, *one} if first.get(key) != one.get(key)}
    return {key for key in found if not any(f"{key}.".replace("#", ".").startswith(f"{name}.") for name in allowed)}
