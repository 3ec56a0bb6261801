"""Disks that are full, broken or read-only: what was there stays valid, the message says the bytes, the run goes on."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.contract.runs import assert_same, rows, state_of
from tests.distributed.ranks import on_ranks
from tests.faults import kills, system_calls
from trlx_like.checkpoint import CheckpointStore, state
from trlx_like.errors import CheckpointError, ConfigError, DiskError
from trlx_like.tracking.jsonl import FILES

AUTO = {"train.resume_from_checkpoint": "auto"}
CONTINUE = {"train.on_checkpoint_error": "continue", "train.checkpoint_interval": 1, "train.eval_interval": 2}
SENTENCE = r"About [\d,]+ bytes are needed, and [\d,]+ bytes are free\. Earlier checkpoints are as they were\."
watching = pytest.mark.skipif(not system_calls.available(), reason="needs ptrace on Linux, x86-64")


def in_child(action: Any, log: Path) -> int:
    """The exit code of an action in a process of its own."""
    return os.waitstatus_to_exitcode(os.waitpid(kills.fork(action, log), 0)[1])


def refused(trainer: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        trainer.save()
    assert re.search(SENTENCE, str(error.value)), error.value
    return str(error.value)


@watching
def test_each_write_of_a_checkpoint_fails_in_turn(tmp_path: Path) -> None:
    """Every third here, with another error each time. The next save succeeds."""
    run = tmp_path / "run"
    trainer = make("SFTTrainer", run, **{"train.total_steps": 2})
    trainer.learn()
    trainer.progress.step = 3
    errors = [errno.ENOSPC, errno.EIO, errno.EROFS]
    store, failed = CheckpointStore(run), 0
    for count in range(1, 1000, 3):

        def save_twice(last: bool = False) -> None:
            system_calls.offer()
            with system_calls.mark():
                try:
                    trainer.save()
                except CheckpointError as error:
                    assert re.search(SENTENCE, str(error)), error
                    print("refused")
                except DiskError as error:  # of the list of files
                    assert re.search(r"About [\d,]+ bytes are needed, and [\d,]+ bytes are free\.", str(error)), error
                    print("refused")
            assert not list(run.glob(".trlx_like-*")) or store.newest() is not None
            store.verify(run / "checkpoint_2")
            trainer.save()

        hits: list[int] = []
        fail = system_calls.full_from(count, "run", errors[count % 3], until=count)

        def decide(call: system_calls.Call, fail: Any = fail, hits: list[int] = hits) -> int | None:
            if error := fail(call):
                hits.append(error)
            return error

        log = tmp_path / f"log_{count}"
        assert system_calls.watch(kills.fork(save_twice, log), decide) == 0, log.read_text()
        store.verify(run / "checkpoint_2")
        store.verify(run / "checkpoint_3")
        assert not list(run.glob(".trlx_like-*"))
        failed += "refused" in log.read_text()
        shutil.rmtree(run / "checkpoint_3")
        if not hits:
            break
    assert failed >= 20 and not hits


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path / "run", **{"train.total_steps": 2})
    trainer.learn()
    trainer.progress.step = 3

    def save() -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        message = refused(trainer)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        print(message)
        trainer.save()

    assert in_child(save, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert "File too large" in (tmp_path / "log").read_text()
    CheckpointStore(tmp_path / "run").verify(tmp_path / "run" / "checkpoint_3")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    if not mount(place, "size=400k"):
        pytest.skip("needs the permission to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def mount(place: Path, options: str, source: str = "tmpfs") -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, source, str(place)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_a_disk_that_is_full_and_then_larger(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on to its end, where the last checkpoint has to be written; what is whole is resumed from."""
    options = {**CONTINUE, "train.save_best": False}
    whole = make("SFTTrainer", tmp_path / "whole", **options)
    whole.learn()
    with caplog.at_level(logging.WARNING, "trlx_like"), pytest.raises(CheckpointError, match=SENTENCE):
        make("SFTTrainer", small_disk / "run", **options).learn()
    assert "No space left on device" in caplog.text and "Training continues" in caplog.text
    assert rows(small_disk / "run")[-1]["step"] == whole.progress.step
    assert CheckpointStore(small_disk / "run").newest() is not None
    assert mount(small_disk, "remount,ro,size=20m")
    with pytest.raises(ConfigError, match="cannot be written to"):
        make("SFTTrainer", small_disk / "run", **options, **AUTO).learn()
    assert mount(small_disk, "remount,rw,size=20m")
    resumed = make("SFTTrainer", small_disk / "run", **options, **AUTO)
    resumed.learn()
    assert_same(state_of(resumed), state_of(whole))
    for name in FILES:
        assert_same(rows(small_disk / "run", name), rows(tmp_path / "whole", name), name)


def refuse_once(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Let the disk refuse the first checkpoint of each of these names."""
    finish = CheckpointStore._finish

    def refusing(self: CheckpointStore, folder: Path, final: Path) -> None:
        if final.name in names:
            names.remove(final.name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        finish(self, folder, final)

    monkeypatch.setattr(CheckpointStore, "_finish", refusing)


def test_the_best_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make("RewardTrainer", tmp_path / "whole", **CONTINUE)
    trainer.learn()
    names = ["checkpoint_001", "best_checkpoint"]
    refuse_once(monkeypatch, names)
    again = make("RewardTrainer", tmp_path / "run", **CONTINUE)
    again.learn()
    assert not names and caplog.text.count("Training continues") == 2
    assert not (tmp_path / "run" / "checkpoint_001").exists() and (tmp_path / "run" / "checkpoint_002").is_dir()
    assert (tmp_path / "run" / "best_checkpoint" / "manifest.json").is_file()
    assert_same(state_of(again)["model"], state_of(trainer)["model"])


def test_a_run_stops_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_once(monkeypatch, ["checkpoint_002"])
    trainer = make("SFTTrainer", tmp_path, **{"train.checkpoint_interval": 1})
    with pytest.raises(CheckpointError, match="checkpoint_002 cannot be written"):
        trainer.learn()
    assert trainer.progress.step == 2


def learn_with_a_broken_disk(rank: int, folder: Path) -> tuple[Any, str]:
    """A run in which the disk refuses what the second process writes of the first checkpoint."""
    save, calls = vars(state)["save_tree"], []

    def broken(tree: Any, path: Path, *given: Any, **options: Any) -> None:
        calls.append(path)
        if rank == 1 and len(calls) == 1:
            raise CheckpointError(f"{path} cannot be written") from OSError(errno.EIO, "")
        save(tree, path, *given, **options)

    vars(state)["save_tree"] = broken
    trainer = make("SFTTrainer", folder, **CONTINUE, **{"train.batch_size": 4, "train.save_best": False})
    trainer.learn()
    return state_of(trainer)["model"], ",".join(sorted(path.name for path in folder.glob("checkpoint_*")))


def test_two_processes_go_on_together(tmp_path: Path) -> None:
    first, second = on_ranks(learn_with_a_broken_disk, tmp_path)
    assert_same(first[0], second[0])
    assert first[1].startswith("checkpoint_002,")  # the first was refused, for both


@watching
@pytest.mark.parametrize("name", [pytest.param("DDPOTrainer", marks=pytest.mark.slow), "SFTTrainer"])
def test_a_disk_that_is_full_from_some_write_on(name: str, tmp_path: Path) -> None:
    """The run ends with a sentence, and is resumed when there is space. `python -m tests.faults` draws more points."""
    expected = kills.whole(name, tmp_path / "whole", 1)
    chance = random.Random(name)
    for number in range(3):
        point = kills.draw(chance, name, "full", expected.events)
        outcome = kills.attempt(point, expected, tmp_path / str(number))
        assert not outcome.difference, f"{point}: {outcome.difference}"
