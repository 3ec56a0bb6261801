"""Checkpoints outlive kill -9 at any moment, and damage done later is found and passed over."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trlx_like.checkpoint import CheckpointStore
from trlx_like.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]

# What a checkpoint of the children holds; its own sums tell that it is whole without asking the manifest.
WRITE = """
import hashlib, itertools, os, signal, sys
from pathlib import Path
from trlx_like.checkpoint.store import CheckpointStore

def write(folder, step, size):
    (folder / "step").write_text(str(step))
    (folder / "hf_model").mkdir()
    sums = []
    for name in ("optimizer", "hf_model/weights"):
        content = os.urandom(size)
        (folder / name).write_bytes(content)
        sums.append(hashlib.md5(content).hexdigest())
    (folder / "sums").write_text(" ".join(sums))

def publish(store, step, size):
    for name in ("best_checkpoint", f"checkpoint_{step}"):
        with store.publish(name) as folder:
            write(folder, step, size)
"""

BACK_TO_BACK = (
    WRITE
    + """
store = CheckpointStore(sys.argv[1], keep=2)
newest = store.newest()
for step in itertools.count(int((newest / "step").read_text()) + 1 if newest else 1):
    publish(store, step, 1 << 20)
    print(step, flush=True)
"""
)

# Forks a process for every file operation that publishing does, which kills itself right before it.
BEFORE_EACH_OPERATION = (
    WRITE
    + """
root = sys.argv[1]
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}

def killed_before(operation):
    done = 0
    def count(event, args):
        nonlocal done
        if event in EVENTS:
            done += 1
            if done > operation:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

def attempt(operation):
    process = os.fork()
    if process == 0:
        killed_before(operation)
        publish(CheckpointStore(root, keep=1), operation + 1, 100)
        os._exit(0)
    return os.waitpid(process, 0)[1]

publish(CheckpointStore(root, keep=1), 0, 100)
for operation in itertools.count():
    status = attempt(operation)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    print(operation, flush=True)
    sys.stdin.readline()
"""
)


def child(program: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint, which must be whole by its own account."""
    assert checkpoint is not None
    sums = [hashlib.md5((checkpoint / name).read_bytes()).hexdigest() for name in ("optimizer", "hf_model/weights")]
    assert (checkpoint / "sums").read_text() == " ".join(sums)
    return int((checkpoint / "step").read_text())


def test_twelve_kills_at_random_moments(tmp_path: Path) -> None:
    moments = random.Random(0)
    store = CheckpointStore(tmp_path)
    published = 0
    for _ in range(12):
        process = child(BACK_TO_BACK, tmp_path)
        assert process.stdout is not None
        published = int(process.stdout.readline())
        time.sleep(moments.uniform(0, 0.08))
        process.kill()
        told = process.stdout.read().split()
        assert process.wait() != 0
        published = int(told[-1]) if told else published
        assert step_of(store.newest()) in (published, published + 1)
        assert step_of(store.resolve(str(tmp_path / "best_checkpoint"))) in (published, published + 1)
    # Two kept, the best, and at most one of each kind that the last kill left behind.
    assert len(list(tmp_path.iterdir())) <= 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_before_each_file_operation(tmp_path: Path) -> None:
    process = child(BEFORE_EACH_OPERATION, tmp_path)
    assert process.stdin is not None and process.stdout is not None
    store = CheckpointStore(tmp_path)
    newest = best = operations = 0
    for line in process.stdout:
        operations += 1
        steps = step_of(store.newest()), step_of(store.resolve(str(tmp_path / "best_checkpoint")))
        assert steps[0] >= newest and steps[1] >= best, f"went back at operation {line}"
        newest, best = steps
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0
    assert step_of(store.newest()) == operations + 1
    assert operations > 40  # two checkpoints of four files, a manifest and a hidden folder each
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_checkpoint", f"checkpoint_{operations + 1}"]


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
