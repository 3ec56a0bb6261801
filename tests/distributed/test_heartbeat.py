"""A process that died, was stopped or hangs ends all processes of the run, with one sentence."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import count_letters, make
from tests.distributed.ranks import on_ranks
from trlx_like import meeting
from trlx_like.distributed.heartbeat import read_notes
from trlx_like.distributed.launcher import free_port
from trlx_like.errors import ProcessError
from trlx_like.meeting import VARIABLE, first_to_say, is_alive, meeting_place

OPTIONS = {"train.batch_size": 2, "train.epochs": 100, "train.total_steps": 8, "train.checkpoint_interval": 1}
PHASE = r"(?:in phase \w+|between two phases)"
WHERE = PHASE + r", at step \d+\. The last checkpoint is \S+checkpoint_\d+\. All processes are ended\."
WHO = rf"Process 1 \(pid \d+ on {re.escape(socket.gethostname())}\) "


def fail(kind: str) -> None:
    """What happens to the second process in the reward function, after two steps."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hanging":
        time.sleep(60)
    elif kind == "failing":
        raise KeyError("a mistake in the reward function")


def trained(rank: int, folder: str, kind: str) -> str:
    """Train until the fault."""

    def reward(**columns: Any) -> list[float]:
        if rank == 1 and trainer.progress.step >= 2:
            fail(kind)
        return count_letters(**columns)

    os.environ[VARIABLE] = folder
    timeouts = {"stopped": 2.0, "hanging": 2.0, "well": 3.0}
    changes: dict[str, Any] = {**OPTIONS, "backend.timeout": timeouts.get(kind, 1800.0)}
    if kind == "well":
        changes |= {"train.batch_size": 8, "train.minibatch_size": 1, "train.total_steps": 2, "method.num_rollouts": 8}
    trainer = make("PPOTrainer", Path(folder) / "run", **changes, reward_fn=reward)
    if kind == "well" and rank == 1:
        passes = iter([0.9] * 4)
        next(trainer.model.parameters()).register_hook(lambda _: time.sleep(next(passes, 0.0)))
    try:
        trainer.learn()
    except ProcessError as error:
        print(error, file=sys.stderr)  # as the command line does
    return "finished"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("killed", "died "),
        ("stopped", r"has not responded for 2 s \(backend\.timeout\) "),
        ("hanging", r"made no progress for 2 s \(backend\.timeout\) "),
    ],
)
def test_one_sentence_ends_all(kind: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="rank 1 died") as outcome:
        on_ranks(trained, str(tmp_path), kind, timeout=30)
    assert "rank 0 hung" not in str(outcome.value)
    said = capfd.readouterr().err
    assert len(re.findall(WHO + words + WHERE, said)) == 1, said
    assert "Traceback" not in said
    assert sorted((tmp_path / "run").glob("checkpoint_*"))


def test_a_run_that_is_well_ends_as_ever(tmp_path: Path) -> None:
    """Also if the backward passes of a step take longer than `backend.timeout` together, each of them several beats."""
    assert on_ranks(left, str(tmp_path), "well") == [("finished", False)] * 2
    assert [note["state"] for note in read_notes(tmp_path)] == ["ended", "ended"]


def left(rank: int, folder: str, kind: str) -> tuple[str, bool]:
    """Train, and say whether the process is in the group after what is called before Python ends."""
    atexit._clear()  # what the test's own process has registered is its own
    said = trained(rank, folder, kind)
    atexit._run_exitfuncs()
    return said, torch.distributed.is_initialized()


LEAVES = """
import os, sys, weakref
import torch
from torch import distributed as dist
from trlx_like.distributed import heartbeat

def reduced():
    tensor = torch.ones(10)
    dist.all_reduce(tensor, async_op=True).wait()
    return weakref.ref(tensor)

dist.init_process_group("gloo")
held = dist.group.WORLD  # as divided weights hold it
for _ in range(20):
    reduced()
for thread in os.listdir("/proc/self/task"):
    if "pt_gloo" in open(f"/proc/self/task/{thread}/comm").read():
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
sys.setswitchinterval(1.0)
last = reduced()
heartbeat._leave()
sys.exit(last() is not None)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own there")
def test_no_thread_gives_a_tensor_back_while_python_ends() -> None:
    """It would abort the process. The thread comes last on a busy machine, and the group outlives its destruction."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, "-c", LEAVES], env={**os.environ, **world, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


def hung_up(rank: int, folder: str) -> int:
    def reward(**columns: Any) -> list[float]:
        if rank == 1 and trainer.progress.step >= 2:
            os.kill(os.getpid(), signal.SIGHUP)
        return count_letters(**columns)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    trainer = make("PPOTrainer", Path(folder), **OPTIONS, reward_fn=reward)
    trainer.learn()
    return 0


def test_sighup_of_one_process_saves_all(tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("trlx_like-*"))
    assert on_ranks(hung_up, str(tmp_path), exits=True) == [129, 129]
    assert sorted(tmp_path.glob("checkpoint_*"))
    for place in set(Path(tempfile.gettempdir()).glob(f"trlx_like-{os.getpid()}-*")) - before:
        assert [note["state"] for note in read_notes(place)] == ["failed", "failed"]


def test_a_message_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting_place() is None and first_to_say("x") and first_to_say("x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    said = [first_to_say(message) for message in ("x", "x", "On process 1: x", "y")]
    assert said == [True, False, False, True]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    assert first_to_say("x")


def test_what_a_launcher_left_is_not_found_by_a_later_one_of_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that is started again, where an error would not be printed at all."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [first_to_say("x"), first_to_say("x")] == [True, False]
    monkeypatch.setattr(meeting, "_stat", lambda pid: ["S"] * 19 + ["1"])
    assert [first_to_say("x"), first_to_say("x")] == [True, False]


def test_a_process_that_waits_for_its_parent_is_not_alive() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
    os.waitpid(child, 0)
    assert is_alive(os.getpid()) and not is_alive(child)
