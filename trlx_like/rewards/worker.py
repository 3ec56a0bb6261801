"""A worker process that calls reward functions, and its handle in the process that trains.

A worker may hang, crash or be killed without harm to the run. It is a new interpreter and not a fork, since a fork
inherits the locks of torch's threads without the threads. It communicates over a socket of its own, so that functions
may print; their output goes to a file. Functions are pickled and unpickled within one run, and never written to disk.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from trlx_like.errors import ConfigError, RewardError, TrlxError, raised_as
from trlx_like.imports import file_modules, import_file
from trlx_like.rewards.call import run_calls
from trlx_like.rewards.limits import Limit
from trlx_like.rewards.outcome import Call, Outcome

GRACE = 1.0
"""Seconds that a function has to return after the alarm in its own process, before the process is killed."""
_TICK = 0.05  # seconds between checks of the memory
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trlx_like.rewards import worker; "
    "worker.main(int(sys.argv[2]), int(sys.argv[3]))"
)

_is_worker = False  # whether this process is one


def refuse_in_worker() -> None:
    """Raise ConfigError in a worker, where a script that is imported for its functions must not train."""
    if _is_worker:
        raise ConfigError(
            "reward.workers: a worker imports the script for its functions, and the script calls train(). Put the call "
            'under `if __name__ == "__main__":`.'
        )


@dataclass(frozen=True)
class Payload:
    """Hold the data that every worker of a run is started with."""

    functions: bytes  # a pickled list
    tokenizer: bytes
    start_limit: float  # seconds
    memory: int | None  # MiB
    log: Path | None  # file for what functions print; None: discard it


Job = Sequence[tuple[int, Call]]
"""Calls that one worker makes together, each with the place of its function in the payload."""


class Worker:
    """Control one worker process, which is started when it is needed and restarted after it was killed."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self._busy = self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, job: Job) -> list[list[Outcome]]:
        """Make the calls of a job in the worker.

        Returns:
            For each call one outcome per sample.

        Raises:
            RewardError: The process cannot be started, or a value cannot be sent to it.
        """
        self._busy = True  # set before `_stopped` is read, while `stop` does it the other way round
        try:
            self._hand_over(job)
            limits = [call.begin() for _, call in job]
            known = [limit.seconds for limit in limits if limit is not None]
            longest = max(known) + GRACE if len(known) == len(limits) else None
            kind, answer = self._asked(pickle.dumps(limits), longest)
        finally:
            self._busy = False
        if kind == "failed":
            raise RewardError(answer)
        if kind == "outcomes":
            return cast("list[list[Outcome]]", answer)
        ended = self.close(at_once=kind != "died")
        return [
            [self._fault(call, kind, limit, ended)] * len(call) for (_, call), limit in zip(job, limits, strict=True)
        ]

    def _hand_over(self, job: Job) -> None:
        """Send the calls, which are not made yet. A process that ended while it was idle is replaced by a new one."""
        with raised_as(RewardError, Exception, "A prompt has a key whose value cannot be sent to reward.workers"):
            message = pickle.dumps([(place, call.columns, call.metadata, call.lengths) for place, call in job])
        ended = ""
        for _ in range(2):
            if self._stopped:
                raise RewardError("The scoring of this batch was cancelled.")
            kind, answer = self._asked(message, self.payload.start_limit)
            if kind == "taken":
                return
            if kind == "failed":
                raise RewardError(answer)
            ended = f"{kind}, {self.close(at_once=True)}"
        raise RewardError(f"A process of reward.workers ended before it had read its batch, twice ({ended}).")

    def _asked(self, message: bytes, seconds: float | None) -> tuple[str, Any]:
        connection = self._started()
        try:
            connection.send_bytes(message)
        except OSError:  # it ended before it had read everything
            return "died", None
        return self._received(seconds)

    def _fault(self, call: Call, kind: str, limit: Limit | None, ended: str) -> Outcome:
        if kind == "time limit" and limit is not None:
            return call.late(limit)
        if kind == "memory limit":
            return call.fault(kind, f"took more memory than reward.worker_memory ({self.payload.memory} MiB).")
        return call.fault("died", f"ended the process that it ran in ({ended}).")

    def stop(self) -> None:
        """Abort the current job and refuse new ones. Call it from another thread than the one that is in `run`."""
        self._stopped = True
        if self._busy and (process := self._process) is not None:
            _kill(process)

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        log = os.devnull if self.payload.log is None else self.payload.log
        command = [sys.executable, "-u", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        starts = raised_as(RewardError, OSError, "A process of reward.workers did not start")
        with starts, open(log, "ab") as output, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, and what the function starts is killed with it
            )
        self._connection = ours
        if self._stopped:
            _kill(self._process)
        ours.send_bytes(pickle.dumps((_modules(), self.payload.functions, self.payload.tokenizer)))
        kind, answer = self._received(self.payload.start_limit)
        if kind == "ready":
            return ours
        ended = self.close(at_once=kind == "time limit")
        reasons = {
            "failed": answer,
            "time limit": f"not within reward.worker_start_limit ({self.payload.start_limit:g} s)",
        }
        raise RewardError(
            f"A process of reward.workers did not start: {reasons.get(kind, ended)}\n  What it printed is in {log}."
        )

    def _received(self, seconds: float | None) -> tuple[str, Any]:
        """Wait for an answer: its kind and content, or the kind of failure and None."""
        assert self._connection is not None
        ends = float("inf") if seconds is None else time.monotonic() + seconds
        tick = 3600.0 if self.payload.memory is None else _TICK
        while not self._connection.poll(max(min(tick, ends - time.monotonic()), 0)):
            if self._too_large():
                return "memory limit", None
            if time.monotonic() >= ends:
                return "time limit", None
        try:
            return cast("tuple[str, Any]", pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            return "died", None

    def _too_large(self) -> bool:
        assert self._process is not None
        if self.payload.memory is None:
            return False
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return False
        return pages * os.sysconf("SC_PAGE_SIZE") > self.payload.memory * 2**20

    def close(self, at_once: bool = False) -> str:
        """End the worker process.

        Args:
            at_once: Kill it now, instead of giving it a second to end by itself.

        Returns:
            How the process ended, in words.
        """
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return "it was ended"
        connection.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0 if at_once else GRACE)
        _kill(process)
        code = process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says so of a process that has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _modules() -> dict[str, Any]:
    """List the modules that a worker cannot import by name: files, and the running script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {"files": file_modules(), "main": (getattr(spec, "name", None), getattr(main, "__file__", None))}


# In the worker.


class _Unpickler(pickle.Unpickler):
    """Unpickle functions from the files and the script of the process that trains."""

    def __init__(self, data: bytes, modules: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.modules = modules

    def find_class(self, module: str, name: str) -> Any:
        file = self.modules["files"].get(module)
        if module == "__main__":
            own, file = self.modules["main"]
            if own is not None:
                return attrgetter(name)(import_module(own))
        return super().find_class(module, name) if file is None else attrgetter(name)(import_file(Path(file)))


def main(socket: int, parent: int) -> None:
    """Run a worker: answer jobs until the other end of the socket is closed."""
    global _is_worker
    _is_worker = True
    connection = Connection(socket)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        modules, functions, tokenizer = pickle.loads(connection.recv_bytes())
        made = _Unpickler(functions, modules).load()
        known = _Unpickler(tokenizer, modules).load()
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, TrlxError) else f"{type(error).__name__}: {error}"
        _answer(connection, "failed", why)
        return
    _answer(connection, "ready", None)
    while True:
        try:
            rows = _Unpickler(connection.recv_bytes(), modules).load()
            _answer(connection, "taken", None)
            limits = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        except Exception as error:
            _answer(connection, "failed", f"A worker cannot read a key of the prompts: {type(error).__name__}: {error}")
            continue
        calls = [
            Call(made[place], columns, metadata, lengths, partial(_same, limit))
            for (place, columns, metadata, lengths), limit in zip(rows, limits, strict=True)
        ]
        try:
            _answer(connection, "outcomes", run_calls(calls, known, killable=True))
        except RewardError as error:
            _answer(connection, "failed", str(error))


def _same(limit: Limit | None) -> Limit | None:
    return limit


def _answer(connection: Connection, kind: str, what: Any) -> None:
    connection.send_bytes(pickle.dumps((kind, what)))


def _end_with(parent: int) -> None:
    """End this worker when the process that it works for has ended, whatever its function is doing."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
