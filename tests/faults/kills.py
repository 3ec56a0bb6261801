"""Kills runs of every trainer at drawn points, resumes them, and compares them with the run that was never killed.

One process imports everything and makes the runs by forking, so that a run costs a second and not ten.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import distributed as dist

from tests.contract.recipes import RECIPES, make, scenarios
from tests.contract.runs import assert_same, rows
from tests.faults import system_calls
from tests.faults.system_calls import Decision
from trlx_like.checkpoint import CheckpointStore
from trlx_like.distributed.launcher import free_port
from trlx_like.errors import TrlxError
from trlx_like.tracking import jsonl

torch.set_num_threads(1)

KINDS = {
    "call": "before a call of a Python function",
    "file": "before a file is opened, made, renamed or deleted",
    "forward": "before the forward pass of a module",
    "line": "in the middle of a written line",
    "publish": "before a system call of publishing a checkpoint",
    "full": "not at all: from a write to the run folder on, the disk is full",
}
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.truncate", "shutil.rmtree"}
OPTIONS: dict[str, Any] = {
    **{"train.checkpoint_interval": 2, "train.eval_interval": 3, "train.keep_checkpoints": 2, "train.epochs": 3},
    **{"train.log_samples_interval": 1, "train.resume_from_checkpoint": "auto"},
}
WATCHED = ("publish", "full")
DECISIONS: dict[str, Callable[[int], Decision]] = {
    "publish": system_calls.kill_before,
    "full": lambda count: system_calls.full_from(count, RUN),
}
UNCOMPARED = {"report.html", "history.jsonl", "run_files.jsonl"}  # show times, and that the run was resumed
RUN = "run"
SECONDS = 600.0


@dataclass(frozen=True)
class Point:
    """Where a run is killed."""

    scenario: str
    kind: str
    count: int  # of the events of that kind on the killed rank, from 1
    rank: int = 0
    patience: float = 0.0  # seconds that the other ranks live on

    def __str__(self) -> str:
        return f"{self.scenario}:{self.kind}:{self.count}" + (f" on rank {self.rank}" if self.rank else "")


@dataclass
class Outcome:
    """What came of a point. difference: empty if the resumed run is the run that was never killed."""

    point: Point
    killed: bool
    difference: str = ""


@dataclass
class Whole:
    """A run that is not killed. events: how many there were, by rank and kind."""

    folder: Path
    events: list[dict[str, int]] = field(default_factory=list)


# In the child that runs.


class Trigger:
    """Counts the events of each kind, and kills the process before the one that a point names.

    watched: the parent follows its system calls.
    """

    def __init__(self, point: Point | None, *, watched: bool) -> None:
        self.point = point
        self.watched = watched
        self.counts = dict.fromkeys(KINDS, 0)

    def due(self, kind: str) -> bool:
        self.counts[kind] += 1
        point = self.point
        return point is not None and point.kind == kind and point.count == self.counts[kind]

    def event(self, kind: str) -> None:
        if self.due(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Count from here on."""
        wanted = set(KINDS) if self.point is None else {self.point.kind}
        if "file" in wanted:
            sys.addaudithook(lambda event, args: self.event("file") if event in FILE_EVENTS else None)
        if "forward" in wanted:
            torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: self.event("forward"))
        if "line" in wanted:
            write: Any = jsonl._write
            jsonl._write = lambda file, rows: write(_HalfLine(file, self), rows)
        if self.watched and self.point is not None and self.point.kind == "full":
            system_calls.offer()
            return
        if self.watched:
            system_calls.offer()
            publish = CheckpointStore.publish

            @contextmanager
            def watched(self: CheckpointStore, *args: Any, **kwargs: Any) -> Iterator[Path]:
                with system_calls.mark(), publish(self, *args, **kwargs) as folder:
                    yield folder

            CheckpointStore.publish = watched  # type: ignore[method-assign]
        if "call" in wanted:
            threading.setprofile(self._profile)  # of threads that start from here on, such as those of async_save
            sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.event("call")


class _HalfLine:
    """A file that gets half of what is written to it where the process is to be killed."""

    def __init__(self, file: Any, trigger: Trigger) -> None:
        self.file = file
        self.trigger = trigger

    def write(self, content: Any) -> int:
        for line in bytes(content).splitlines(keepends=True):
            if self.trigger.due("line"):
                self.file.write(line[: len(line) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            self.file.write(line)
        return len(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def fork(action: Callable[[], object], log: Path) -> int:
    """Run an action in a child, whose output goes to a file, and return its pid. It exits with 0, 1 or its own code."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # not pytest's
        action()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _learn(scenario: str, folder: Path, trigger: Trigger | None, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.chdir(folder)  # the run folder is a relative path, so that every run's config.yml is the same
    name, changes = scenarios()[scenario]
    trainer = make(name, Path(RUN), **{**_options(int(variables.get("WORLD_SIZE", 1))), **changes, **OPTIONS})
    if trigger is not None:
        trigger.arm()
    full = trigger is not None and trigger.point is not None and trigger.point.kind == "full"
    with system_calls.mark() if full else nullcontext():
        try:
            trainer.learn()
        except TrlxError as error:
            print(f"{type(error).__name__}: {error}")
            raise SystemExit(error.exit_code) from None
    sys.setprofile(None)
    threading.setprofile(None)
    if trigger is not None and trigger.point is None:
        counts = " ".join(f"{kind}={count}" for kind, count in trigger.counts.items())
        Path(f"events_{variables.get('RANK', 0)}").write_text(counts)
    if dist.is_initialized():
        dist.destroy_process_group()


def _options(ranks: int) -> dict[str, Any]:
    return {} if ranks == 1 else {"train.batch_size": 4}


# In the parent.


def run(
    scenario: str, folder: Path, ranks: int, point: Point | None = None, count: dict[int, list[str]] | None = None
) -> list[int]:
    """Make a run, and return the wait status of every rank.

    point: where it is killed. count: counts the events of every rank, and gets the system calls of the rank in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    watched = {point.rank} if point is not None and point.kind in WATCHED else set(count or {})
    pids: list[int] = []
    for rank in range(ranks):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        at = point if point is not None and point.rank == rank else None
        trigger = None if at is None and count is None else Trigger(at, watched=rank in watched)

        def action(trigger: Trigger | None = trigger, own: Mapping[str, str] = own) -> None:
            _learn(scenario, folder, trigger, own)

        pids.append(fork(action, folder / "log"))
    statuses: dict[int, int] = {}
    for rank in watched:
        if count:
            decide: Decision = system_calls.collect(count[rank])
        else:
            assert point is not None
            decide = DECISIONS[point.kind](point.count)
        statuses[rank] = system_calls.watch(pids[rank], decide)
    if point is not None and point.rank not in statuses:
        _wait({point.rank: pids[point.rank]}, statuses, SECONDS)
    _wait(dict(enumerate(pids)), statuses, SECONDS if point is None else point.patience)
    return [statuses[rank] for rank in range(ranks)]


def _wait(pids: Mapping[int, int], statuses: dict[int, int], seconds: float) -> None:
    """Collect the wait statuses of processes; those that live on after these seconds are killed."""
    until = time.monotonic() + seconds
    left = {rank: pid for rank, pid in pids.items() if rank not in statuses}
    while left:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[rank] = status
                del left[rank]
        if left and time.monotonic() > until:
            for pid in left.values():
                os.kill(pid, signal.SIGKILL)
            until += 10
        if left:
            time.sleep(0.005)


def whole(scenario: str, folder: Path, ranks: int) -> Whole:
    """Make the run that is not killed, and count its events; once for each rank whose system calls are counted."""
    events: list[dict[str, int]] = []
    for rank in range(ranks):
        place = folder / f"{rank}"
        calls: list[str] = []
        if any(run(scenario, place, ranks, count={rank: calls} if system_calls.available() else {})):
            raise RuntimeError(f"{scenario} does not run:\n{tail(place)}")
        words = (word.split("=") for word in (place / f"events_{rank}").read_text().split())
        events.append({kind: int(number) for kind, number in words} | dict.fromkeys(WATCHED, len(calls)))
    return Whole(folder / "0", events)


def tail(folder: Path) -> str:
    """The end of what a run printed."""
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-25:])


def attempt(point: Point, expected: Whole, folder: Path) -> Outcome:
    """Kill a run at a point, resume it, and compare. The folder is deleted if there is no difference."""
    ranks = len(expected.events)
    statuses = run(point.scenario, folder, ranks, point)
    status = statuses[point.rank]
    if point.kind == "full" and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
        if "bytes are free" not in tail(folder):  # on any line: the other processes say that one has failed
            return Outcome(point, True, f"it says no bytes: {tail(folder)}")
    elif not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        if code == 0:  # it made fewer calls this time
            shutil.rmtree(folder)
            if point.count > 1:
                return attempt(replace(point, count=point.count * 9 // 10), expected, folder)
        return Outcome(point, False, "" if code == 0 else f"the run failed with code {code}:\n{tail(folder)}")
    try:
        if any(run(point.scenario, folder, ranks)):
            return Outcome(point, True, f"it cannot be resumed:\n{tail(folder)}")
        assert_same_folder(folder / RUN, expected.folder / RUN)
    except AssertionError as error:
        return Outcome(point, True, str(error))
    shutil.rmtree(folder)
    return Outcome(point, True)


def assert_same_folder(folder: Path, expected: Path) -> None:
    """The same files, bit by bit; of the rows of a .jsonl file everything but what a clock says."""
    names = [
        {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} - UNCOMPARED
        for place in (folder, expected)
    ]
    missing, extra = sorted(names[1] - names[0]), sorted(names[0] - names[1])
    assert not missing and not extra, f"missing files: {missing}; extra files: {extra}"
    for name in sorted(names[1], key=lambda name: (not name.endswith(".jsonl"), name)):
        if name.endswith(".jsonl"):
            assert_same(rows(folder, name), rows(expected, name), name)
        else:
            assert (folder / name).read_bytes() == (expected / name).read_bytes(), f"{name} differs"


def draw(chance: random.Random, scenario: str, kind: str, events: list[dict[str, int]]) -> Point:
    """A point of a kind in a run with these events."""
    rank = chance.choice([rank for rank, counts in enumerate(events) if counts[kind]])
    total = events[rank][kind]
    patience = chance.choice([0.0, 0.1, 1.0]) if len(events) > 1 else 0.0
    return Point(scenario, kind, chance.randint(1, total), rank, patience)


def trainers() -> list[str]:
    """Every registered trainer; tests/contract/test_recipes.py holds that each has a recipe."""
    return list(RECIPES)
