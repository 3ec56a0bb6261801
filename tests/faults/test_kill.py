"""Checkpoints outlive kill -9 at any moment, and damage done later is found and passed over."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import kills, system_calls
from trlx_like.checkpoint import CheckpointStore
from trlx_like.errors import CheckpointError

watching = pytest.mark.skipif(not system_calls.available(), reason="needs ptrace on Linux, x86-64")


def write(folder: Path, step: int) -> None:
    """Write a checkpoint whose own sums tell that it is whole, without asking the manifest."""
    (folder / "step").write_text(str(step))
    (folder / "hf_model").mkdir()
    contents = [os.urandom(100), os.urandom(100)]
    for name, content in zip(("optimizer", "hf_model/weights"), contents, strict=True):
        (folder / name).write_bytes(content)
    (folder / "sums").write_text(" ".join(hashlib.md5(content).hexdigest() for content in contents))


def publish(root: Path, step: int) -> None:
    for name in ("best_checkpoint", f"checkpoint_{step}"):
        with CheckpointStore(root, keep=1).publish(name) as folder:
            write(folder, step)


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint, which must be whole by its own account."""
    assert checkpoint is not None
    sums = [hashlib.md5((checkpoint / name).read_bytes()).hexdigest() for name in ("optimizer", "hf_model/weights")]
    assert (checkpoint / "sums").read_text() == " ".join(sums)
    return int((checkpoint / "step").read_text())


@watching
def test_a_kill_before_each_system_call(tmp_path: Path) -> None:
    """Of publishing a best and a numbered checkpoint, which replace earlier ones, where the kill before left it."""
    root = tmp_path / "run"
    publish(root, 0)
    store = CheckpointStore(root)
    newest = best = 0
    for count in range(1, 1000):

        def attempt(step: int = count) -> None:
            system_calls.offer()
            with system_calls.mark():
                publish(root, step)

        status = system_calls.watch(kills.fork(attempt, tmp_path / "log"), system_calls.kill_before(count))
        steps = step_of(store.newest()), step_of(store.resolve(str(root / "best_checkpoint")))
        assert steps[0] >= newest and steps[1] >= best, f"went back at system call {count}"
        newest, best = steps
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, (tmp_path / "log").read_text()
    assert (newest, best) == (count, count) and count > 60
    assert sorted(path.name for path in root.iterdir()) == ["best_checkpoint", f"checkpoint_{count}"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints, of steps 1 and 2."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        with store.publish(f"checkpoint_{step}") as folder:
            (folder / "state").mkdir()
            (folder / "state" / "model").write_bytes(random.Random(step).randbytes(300))
            (folder / "state" / "manifest.json").write_text("{}")  # another library's, a file like others
            (folder / "rng").write_bytes(b"12345")
    return store


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Damage that consists of a manifest that lies."""

    def damage(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        change(content)
        (path / "manifest.json").write_text(json.dumps(content))

    return damage


def truncate(path: Path) -> None:
    with (path / "state" / "model").open("r+b") as file:
        file.truncate(299)


def replace_by_link(path: Path) -> None:
    (path / "rng").rename(path.parent / "rng")
    (path / "rng").symlink_to(path.parent / "rng")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "state/model is damaged: 299 bytes, and 300 were written"),
    "emptied": (lambda path: (path / "rng").write_bytes(b""), "rng is damaged: 0 bytes"),
    "changed": (lambda path: (path / "rng").write_bytes(b"12346"), "rng is damaged: its content"),
    "another manifest": (lambda path: (path / "state" / "manifest.json").unlink(), "state/manifest.json is missing"),
    "deleted": (lambda path: (path / "rng").unlink(), "rng is missing"),
    "folder deleted": (lambda path: shutil.rmtree(path / "state"), "state/manifest.json is missing"),
    "added": (lambda path: (path / "state" / "new").touch(), r"state/new is not in manifest\.json"),
    "renamed": (lambda path: (path / "rng").rename(path / "rgn"), "rng is missing"),
    "a link": (replace_by_link, "rng is a link"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"has no manifest\.json"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 60), r"manifest\.json is damaged"),
    "nested manifest": (lambda path: (path / "manifest.json").write_text("[" * 9999), r"json is damaged"),
    "no hash": (manifest(lambda content: content["files"]["rng"].pop("sha256")), "rng is damaged"),
    "another size": (manifest(lambda content: content["files"]["rng"].update(size=6)), "rng is damaged: 5"),
    "no facts": (manifest(lambda content: content["files"].update(rng=None)), "does not describe .*rng"),
    "no files": (manifest(lambda content: content.update(files=[])), "this release reads"),
    "a later format": (manifest(lambda content: content.update(version=2)), "version 2; this release reads"),
    "a way out": (
        manifest(lambda content: content["files"].update({"../../secret": content["files"].pop("rng")})),
        r"checkpoint_2: \.\./\.\./secret is missing",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(
    checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, message = DAMAGE[kind]
    path = checkpoints.directory / "checkpoint_2"
    checkpoints.verify(path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.verify(path)
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert checkpoints.newest() == checkpoints.directory / "checkpoint_1"
    assert [record.name for record in caplog.records] == ["trlx_like"]
    assert "Passing over" in caplog.text and "checkpoint_2" in caplog.text


def test_any_flipped_bit_is_found(checkpoints: CheckpointStore) -> None:
    path = checkpoints.directory / "checkpoint_2"
    files = [path / "state" / "model", path / "rng", path / "manifest.json"]
    chance = random.Random(0)
    for _ in range(200):
        file = chance.choice(files)
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            checkpoints.verify(path)
        file.write_bytes(content)
    checkpoints.verify(path)
