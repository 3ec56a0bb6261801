"""Start the processes of a run on this machine, one of several or the only one, and start them again if one fails.

torchrun would serve as well for starting. It restarts after every error, also after those that only the user can mend,
and kills processes that need more than 30 seconds to save after a signal.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trlx_like.distributed.heartbeat import RUNNING, read_notes
from trlx_like.distributed.orphans import VARIABLE as LIFE_LINE
from trlx_like.meeting import VARIABLE

PATIENCE = 20.0
"""Seconds that the other processes get to end by themselves after one has failed."""

SILENCE = 15.0
"""Seconds without a note after which a process that was asked to stop will not answer."""

STOPPING = [getattr(signal, one) for one in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, one)]
"""Signals that ask a run to stop."""

STOPPED = (129, 130, 138, 143)
"""Exit codes of processes that saved and ended because of a signal; 138 is SIGUSR1, of a scheduler."""

FINAL = (0, 2, 3, *STOPPED)
"""Exit codes after which a run is not started again: it ended, was stopped, or the user has to mend something."""


@dataclass(frozen=True)
class Node:
    """Hold the place of this machine in a run.

    Attributes:
        number: Number of the machine, from 0.
        count: Number of machines, each with as many processes.
        address: Name or address of machine 0.
        port: A port that is free there; None: chosen here, for a run on one machine.
    """

    number: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int | None = None


def launch(
    command: Sequence[str], processes: int, restarts: int = 0, resume: Sequence[str] = (), node: Node | None = None
) -> int:
    """Run `python <command>` as a distributed run, and return its exit code. It is called on each machine of the run.

    Signals to this process are forwarded to all processes of the run, and it waits until they have saved. When a
    process fails, the others have `PATIENCE` seconds to end by themselves before they are killed. When this process
    is killed, they save and end.

    Args:
        command: Arguments of the Python interpreter.
        processes: Number of processes on this machine.
        restarts: How often the run is started again after a failure, unless its exit code is one of `FINAL`.
        resume: Arguments in place of `command` for a run that is started again.
        node: The place of this machine; None: it is the only one.
    """
    node = node or Node()
    code = _launch(command, processes, node)
    for number in range(1, restarts + 1):
        if code in FINAL:
            break
        _say(f"The run failed with exit code {code}, and goes on from its newest checkpoint ({number} of {restarts}).")
        code = _launch(resume, processes, node)
    return code


def _launch(command: Sequence[str], processes: int, node: Node) -> int:
    """Start the processes once, and return the exit code of the run."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": node.address}
    environment |= {"MASTER_PORT": str(node.port or free_port()), "WORLD_SIZE": str(processes * node.count)}
    children: list[subprocess.Popen[bytes]] = []
    with (
        _passed_on(children) as asked,
        life_line() as (handles, variables),
        tempfile.TemporaryDirectory(prefix="trlx_like-") as meeting,
    ):
        variables[VARIABLE] = meeting
        for rank in range(processes):
            own = {"RANK": str(node.number * processes + rank), "LOCAL_RANK": str(rank)}
            own["LOCAL_WORLD_SIZE"] = str(processes)
            # In a session of their own, or a Ctrl-C of the terminal would reach them twice: stop at once, do not save.
            child = subprocess.Popen(
                [sys.executable, *command],
                env={**environment, **own, **variables},
                start_new_session=True,
                pass_fds=handles,
            )
            children.append(child)
        return _wait(children, asked, Path(meeting), node)


@dataclass
class Asked:
    """Hold the first signal that asked the run to stop, and when it came."""

    number: int = 0
    since: float = 0.0


@contextmanager
def life_line() -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Hold a pipe open whose end tells children that this process is gone; yield the handles and variables for them."""
    if os.name == "nt":  # it cannot pass handles on
        yield (), {}
        return
    reading, writing = os.pipe()
    try:
        yield (reading,), {LIFE_LINE: str(reading)}
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def _passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[Asked]:
    """Forward signals that would end this process to the children, within a `with` block; yield the first of them."""
    asked = Asked()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.number, asked.since = asked.number or number, asked.since or time.monotonic()
        for child in children:
            if child.poll() is None and (os.name != "nt" or number != signal.SIGINT):  # Windows has no sessions
                child.send_signal(number)

    with handled(STOPPING, pass_on):
        yield asked


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a function handle signals within a `with` block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _wait(children: Sequence[subprocess.Popen[bytes]], asked: Asked, meeting: Path, node: Node) -> int:
    """Wait; return the exit code of the first process that failed, else of one stopped by a signal, else 0."""
    failed, since = 0, 0.0
    while running := [child for child in children if child.poll() is None]:
        if not failed:
            failed, since = _failure(children), time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            _kill(running)
        if asked.number and time.monotonic() - asked.since > SILENCE and (silent := _silent(meeting)):
            _say(f"Process {silent} does not answer to the request to stop, so nothing can be saved. All are killed.")
            _kill(running)
            return 128 + asked.number
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=0.2)
    failed = failed or _failure(children)
    if failed < 0 and not list(meeting.glob("said-*")):
        place = next(place for place, child in enumerate(children) if child.returncode == failed)
        where = f"node {node.number}, " if node.count > 1 else ""
        why = ": out of memory?" if failed == -signal.SIGKILL else "."
        rank = node.number * len(children) + place
        _say(f"Process {rank} ({where}pid {children[place].pid}) was killed by {signal.Signals(-failed).name}{why}")
    return failed or max(child.returncode for child in children)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()


def _silent(meeting: Path) -> str:
    """Return the rank and the pid of processes that have not written a note for `SILENCE` seconds; "" if all have."""
    silent = []
    for note in read_notes(meeting):
        file = meeting / f"rank_{note['rank']}.json"
        with suppress(OSError):
            if note["state"] == RUNNING and time.time() - file.stat().st_mtime > SILENCE:
                silent.append(f"{note['rank']} (pid {note['pid']})")
    return " and ".join(silent)


def _failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of a process that failed (not 0, and not stopped by a signal); 0 without one."""
    ended = [child.returncode for child in children if child.returncode is not None]
    return next((code for code in ended if code not in (0, *STOPPED)), 0)


def slurm_node(environment: Mapping[str, str]) -> Node:
    """Read the place of this machine from the variables of a job step of SLURM; without them it is the only one."""
    if "SLURM_NODEID" not in environment:
        return Node()
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", environment["SLURM_JOB_NODELIST"])  # a1,b2 or a[01-04,07]
    address = "".join(part or "" for part in first.groups()) if first else "127.0.0.1"
    port = 10_000 + int(environment["SLURM_JOB_ID"]) % 20_000  # the same on all machines, another one in each job
    return Node(int(environment["SLURM_NODEID"]), int(environment["SLURM_NNODES"]), address, port)


def free_port() -> int:
    """Find a port that nothing listens on, below the range that systems assign automatically.

    A port of that range (32768 and up on Linux) could be assigned to another process before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
