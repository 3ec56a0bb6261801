"""`train.async_save`: the same checkpoints as without it, while training goes on."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.contract.recipes import make
from trlx_like import Callback
from trlx_like.checkpoint import CheckpointStore
from trlx_like.checkpoint.beside import Beside
from trlx_like.errors import CheckpointError

OPTIONS = {"train.total_steps": 4, "train.checkpoint_interval": 2, "train.eval_interval": 100, "train.save_best": False}
BESIDE = {**OPTIONS, "train.async_save": True}
DIFFERENT = {"made_with.json", "manifest.json"}  # they have the option, and the hash of the file that has it


def contents(checkpoint: Path) -> dict[str, bytes]:
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name not in DIFFERENT)
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


class Watch(Callback):
    """Lets checkpoints be written after the third step, and notes what there is at each call."""

    def __init__(self, folder: Path, go_on: Event) -> None:
        self.folder, self.go_on = folder, go_on
        self.seen: list[str] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        names = sorted(path.name for path in self.folder.iterdir() if "checkpoint_" in path.name)
        self.seen.append(f"{trainer.progress.step}: {' '.join(names)}")
        if trainer.progress.step == 3:
            self.go_on.set()

    def on_save(self, trainer: Any, directory: Path) -> None:
        CheckpointStore(self.folder).verify(directory)
        self.seen.append(f"{trainer.progress.step}: {directory.name} is complete")


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("SFTTrainer", tmp_path / "at once", **OPTIONS).learn()
    go_on, write = Event(), Beside.write
    monkeypatch.setattr(Beside, "write", lambda self, folder: go_on.wait(10) and write(self, folder))
    watch = Watch(tmp_path / "beside", go_on)
    make("SFTTrainer", tmp_path / "beside", **BESIDE, callbacks=[watch]).learn()
    assert watch.seen[:3] == ["1: ", "2: ", "3: .trlx_like-writing-checkpoint_2"]
    # The last checkpoint waits for the one before, and is written at once.
    assert watch.seen[4:] == ["4: checkpoint_2 is complete", "4: checkpoint_4 is complete"]
    for name in ("checkpoint_2", "checkpoint_4"):
        assert contents(tmp_path / "beside" / name) == contents(tmp_path / "at once" / name)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the disk refuse the first checkpoint of this name."""
    write, names = Beside.write, [name]

    def refusing(self: Beside, folder: Path) -> None:
        write(self, folder)
        if names and folder.name.endswith(names[0]):
            names.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Beside, "write", refusing)


@pytest.mark.parametrize(("interval", "step"), [(1, 2), (3, 4)])
def test_a_disk_that_refuses_ends_the_run(
    interval: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next checkpoint, or after the last one is written."""
    refuse(monkeypatch, f"checkpoint_{interval}")
    trainer = make("SFTTrainer", tmp_path, **{**BESIDE, "train.checkpoint_interval": interval})
    with pytest.raises(CheckpointError, match=f"checkpoint_{interval} cannot be written"):
        trainer.learn()
    assert trainer.progress.step == step
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_4"] * (step == 4)


def test_a_best_checkpoint_that_is_refused_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second evaluation is worse than the first one, whose checkpoint was lost, and so is the best there is."""
    rewards = iter([0.0, 5.0, 4.0, 3.0, 2.0])
    refuse(monkeypatch, "best_checkpoint")
    options = {**BESIDE, "train.save_best": True, "train.eval_interval": 1, "train.on_checkpoint_error": "continue"}
    trainer = make("SFTTrainer", tmp_path, **options, reward_fn=None, metric_fn=lambda: {"reward": next(rewards)})
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer.learn()
    assert caplog.text.count("Training continues") == 1
    assert trainer.progress.best == 4.0
    assert b'"step": 2' in (tmp_path / "best_checkpoint" / "state" / "shared" / "progress.json").read_bytes()


def test_an_error_of_the_run_waits_for_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
            if trainer.progress.step == 3:
                raise RuntimeError("mine")

    trainer = make("SFTTrainer", tmp_path, **BESIDE, callbacks=[Broken()])
    with pytest.raises(RuntimeError, match="mine"):
        trainer.learn()
    CheckpointStore(tmp_path).verify(tmp_path / "checkpoint_2")
    assert not trainer.run.folder.files.in_use() and not list(tmp_path.glob(".trlx_like-*"))
