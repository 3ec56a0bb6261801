"""What changes while a trainer trains is in its checkpoints, or it is named here with the reason why not."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.recipes import RECIPES, make
from trlx_like.checkpoint import Fields
from trlx_like.config import TRAINERS
from trlx_like.trainers.callbacks import Callback

# Attributes that change and need no saving.
NOT_STATE = {
    ".callbacks",  # the caller's
    ".agreement.canary.before",  # of the last round, for the words of an error
    ".run.clock",  # seconds of this process
    ".run.tracker",  # files and connections, opened anew; what finds them again is in `progress.tracker`
    ".run.folder.resumed",  # of this process
    ".run.folder.files",  # the list is a file of the run folder
    ".run.stop_request",  # of this process
    ".run.state",  # what is saved
    ".prompts._drawn",  # follows from the epoch and the seed
    ".store.epoch",  # told again when a resumed run skips the batches that it has done
    ".store.rows",  # of the batch before, for the ledger
    ".last_metrics",  # what `learn` returns; nothing reads it to train
    ".round_steps",  # follows from the store and the configuration
    ".rollouts.samples",  # of the round, for its metrics
    ".rollouts.faults",
    ".rollouts.prompts",
    ".sampler.engine.lm",  # brought up to date before it is used
    ".sampler.engine.version",  # the same
    ".rollouts.extreme",
    ".rollouts.warned",  # once in a process
    ".divergence_watch._warned",
    ".divergence_watch.optimisation",  # looked at as the trainer's own
    ".optimisation.guard._copies",  # of the last step, to undo it
    ".by_hand.sampler",  # the same
    ".rollouts.scoring",  # looked at as the trainer's own
}
# Gone by every step boundary: what is seen of it between two steps is a step half done.
BETWEEN_STEPS = {"._pending"}


def contents(trainer: Any) -> dict[str, Any]:
    """Everything that hangs on a trainer by its place: numbers, text, digests of tensors. Without what is saved."""
    saved = {id(trainer.config)}  # the caller's; saving a model notes its class in the model's own configuration
    names: set[tuple[int, str]] = set()
    for kept in trainer.state.items.values():
        if isinstance(kept.item, Fields):
            names |= {(id(kept.item.owner), name) for name in kept.item.names}
        else:
            saved.add(id(kept.item))
        if isinstance(kept.item, nn.Module):
            saved |= {id(part) for part in (*kept.item.modules(), *kept.item.parameters(), *kept.item.buffers())}
    # Every part holds the run, which is looked at once.
    return {
        **dict(_walk(trainer, "", saved | {id(trainer.run)}, names)),
        **dict(_walk(trainer.run, ".run", saved, names)),
    }


def _walk(value: Any, place: str, seen: set[int], names: set[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or place in NOT_STATE | BETWEEN_STEPS:
        return
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        yield place, value
    elif isinstance(value, torch.Tensor):
        yield place, hashlib.sha256(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    elif isinstance(value, torch.Generator):
        yield place, value.get_state().sum().item()
    elif isinstance(value, nn.Module):
        seen = seen | {id(value)}
        for name, entry in value.state_dict(keep_vars=True).items():
            yield from _walk(entry, f"{place}.{name}", seen, names)
    else:
        parts = _parts(value)
        if parts is not None:
            yield f"{place}#", len(parts)
            for name, part in parts.items():
                if (id(value), name) not in names:
                    yield from _walk(part, f"{place}.{name}", seen | {id(value)}, names)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Of plain containers and of our own objects; those of other packages are theirs to look after."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {str(row): item for row, item in enumerate(value)}
    ours = type(value).__module__.split(".")[0] in ("trlx_like", "tests", __name__.split(".")[0])
    if (ours or dataclasses.is_dataclass(value)) and hasattr(value, "__dict__"):
        return vars(value)
    return None


class Watch(Callback):
    """Keeps what hangs on the trainer at every step boundary."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.seen.append(contents(trainer))


def changing(
    trainer_class: type[Any], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *variants: Mapping[str, Any]
) -> set[str]:
    """Places that differ between any two steps of a recipe's run, or of its run with the options of a variant."""
    with monkeypatch.context() as patch:
        patch.setattr(TRAINERS, "get", lambda _: trainer_class)
        found: set[str] = set()
        for row, changes in enumerate([{}, *variants]):
            watch = Watch()
            options = {"train.eval_interval": 2, "train.checkpoint_interval": 3, **changes}
            make(name, folder / str(row), **options, callbacks=[watch]).learn()
            assert len(watch.seen) > 3
            first = watch.seen[0]
            found |= {key for seen in watch.seen[1:] for key in {*first, *seen} if first.get(key) != seen.get(key)}
    return found


@pytest.mark.parametrize("name", list(RECIPES))
def test_everything_that_changes_is_saved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changing(TRAINERS.get(name), name, tmp_path, monkeypatch, *RECIPES[name].variants.values()) == set()


@pytest.mark.parametrize(
    "name",
    [name if name in ("SFTTrainer", "PPOTrainer") else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_a_counter_that_nobody_registered_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TRAINERS.get(name)):  # type: ignore[misc]
        """Counts in three places that no checkpoint holds."""

        def build(self, tokenizer: Any = None) -> None:
            super().build(tokenizer)
            self.calls, self.nested, self.average = 0, {"deep": [0.0]}, torch.zeros(2)

        def after_step(self, metrics: dict[str, float]) -> None:
            super().after_step(metrics)
            self.calls += 1
            self.nested["deep"][0] += 0.5
            self.average += 1

    assert changing(Forgetful, name, tmp_path, monkeypatch) == {".calls", ".nested.deep.0", ".average"}
