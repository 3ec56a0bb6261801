"""Ends a run of several processes when one of them has died, was stopped, or makes no progress.

A thread of each process notes every second that the process lives, in which phase, and at which step, and reads the
notes of the others on this machine. Processes on other machines are covered by the timeout of the process group.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import distributed as dist

from trlx_like.distributed.world import World
from trlx_like.errors import ProcessError
from trlx_like.meeting import VARIABLE, first_to_say, is_alive, meeting_place

INTERVAL = 1.0
"""Seconds between two notes."""
GRACE = 5.0
"""Seconds in which a process that lost the connection looks for the one that died."""
LOST = "a process is lost"
"""What one process of a run says, in words of its own: the others may see the end of a process that ended itself."""
RUNNING, FAILED, ENDED = "running", "failed", "ended"
CONNECTION = re.compile("gloo|nccl|connection|socket|timed out", re.IGNORECASE)
"""Words of the errors that a process gets when another one is gone."""


class Heartbeat:
    """Note what this process does, and watch the others.

    Args:
        world: The processes of the run.
        timeout: Seconds without progress after which all processes are ended; None never ends them.
        about: Returns what this process is doing: "phase", "step", "checkpoint", and "progress", a number that changes
            with every phase.
    """

    def __init__(self, world: World, timeout: float | None, about: Callable[[], Mapping[str, Any]]) -> None:
        self.world, self.timeout, self.about = world, timeout, about
        self._count = 0
        self._changed: dict[tuple[int, str], tuple[Any, float]] = {}  # values by rank and name, and when they were new
        self._stop = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch within a `with` block. A process that is the only one of its run has nothing to watch.

        Raises:
            ProcessError: In place of an error of the connection, if another process has died or failed.
            SystemExit: The same, if another process has said so.
        """
        place = meeting_place() if self.world.size > 1 else None
        if place is None:
            yield
            return
        self._note(place, RUNNING)
        self._stop.clear()
        thread = threading.Thread(target=self._run, args=(place,), daemon=True, name="heartbeat")
        thread.start()
        state = FAILED
        try:
            yield
            state = ENDED
            atexit.register(_leave)
        except SystemExit:  # a signal, after which all processes have saved
            atexit.register(_leave)
            raise
        except RuntimeError as error:
            lost = self._wait_for_lost(place) if CONNECTION.search(str(error)) else None
            if lost is None:
                raise
            if not first_to_say(LOST):
                raise SystemExit(ProcessError.exit_code) from None
            raise ProcessError(lost) from None
        finally:
            self._stop.set()
            thread.join()
            with suppress(OSError):
                self._note(place, state)
                states = [note["state"] for note in read_notes(place)]
                if states == [ENDED] * self.world.size and VARIABLE not in os.environ:  # nobody else cleans up
                    shutil.rmtree(place, ignore_errors=True)

    def _run(self, place: Path) -> None:
        """Note and watch until the block ends. A process that waits for a lost one can only be ended from here."""
        while not self._stop.wait(min(INTERVAL, (self.timeout or INTERVAL) / 4)):
            with suppress(OSError):  # a folder that was cleaned up or is full must not end the run
                self._note(place, RUNNING)
                lost = self._lost(place)
                if lost is not None and not self._stop.is_set():
                    if first_to_say(LOST):
                        print(lost, file=sys.stderr, flush=True)
                    os._exit(ProcessError.exit_code)

    def _note(self, place: Path, state: str) -> None:
        self._count += 1
        note = {
            **self.about(),
            "rank": self.world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "waiting": self.world.waiting,
            "count": self._count,
            "state": state,
        }
        file = place / f"rank_{self.world.rank}.json"
        file.with_suffix(".new").write_text(json.dumps(note), encoding="utf-8")
        file.with_suffix(".new").replace(file)

    def _wait_for_lost(self, place: Path) -> str | None:
        """Look for a process that died for a few seconds, because its end is noticed after its connections close."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            lost = self._lost(place)
            failed = [note for note in read_notes(place) if note["state"] == FAILED]
            if lost is not None or failed:
                return lost or f"{_who(failed[0])} failed {self._where(failed[0])}"
            time.sleep(0.2)
        return None

    def _lost(self, place: Path) -> str | None:
        """Return a sentence about a process that died, stopped or made no progress; None if all is well."""
        notes = read_notes(place)
        for note in notes:
            if note["state"] == RUNNING and not is_alive(note["pid"]):
                return f"{_who(note)} died {self._where(note)}"
        if self.timeout is None:
            return None
        now = time.monotonic()
        for name, what in (("count", "has not responded"), ("progress", "made no progress")):
            for note in notes:
                value, since = self._changed.get((note["rank"], name), (None, now))
                if note[name] != value or note["state"] != RUNNING or (name == "progress" and note["waiting"]):
                    self._changed[note["rank"], name] = (note[name], now)
                elif now - since > self.timeout:
                    if name == "count":  # stopped: torchrun's SIGTERM would reach it only when it goes on
                        with suppress(OSError):
                            os.kill(note["pid"], getattr(signal, "SIGKILL", signal.SIGTERM))
                    return f"{_who(note)} {what} for {self.timeout:g} s (backend.timeout) {self._where(note)}"
        return None

    def _where(self, note: Mapping[str, Any]) -> str:
        """Say where a process was. Step and checkpoint are this process's: the note may be a second old."""
        own = self.about()
        phase = f"in phase {note['phase']}" if note["phase"] else "between two phases"
        saved = f"The last checkpoint is {own['checkpoint']}" if own["checkpoint"] else "There is no checkpoint yet"
        return f"{phase}, at step {own['step']}. {saved}. All processes are ended."


def _leave() -> None:
    """Leave the group of processes, after a run that ended on all of them.

    Or a thread of gloo that still has a tensor may abort the process while Python ends, and the launcher the others. In
    a process that failed it could wait for the others for ever.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        # Threads of a group end with it, unless something still holds it, as all that divides weights does.
        end = time.monotonic() + GRACE
        time.sleep(0.02)  # others may use Python meanwhile, to give a tensor back
        while _gloo_is_busy() and time.monotonic() < end:
            time.sleep(0.02)


def _gloo_is_busy() -> bool:
    """Tell whether a thread of gloo runs, or is about to. Linux says so; elsewhere it is not known."""
    with suppress(OSError):
        stats = [file.read_text() for file in Path("/proc/self/task").glob("*/stat")]
        return any(re.match(r"\d+ \(pt_gloo\w*\) R", stat) for stat in stats)
    return False


def read_notes(place: Path) -> list[dict[str, Any]]:
    """Return the notes of all processes on this machine, in the order of ranks."""
    notes = []
    for file in place.glob("rank_*.json"):
        with suppress(OSError, ValueError):
            notes.append(json.loads(file.read_text(encoding="utf-8")))
    return sorted(notes, key=lambda note: int(note["rank"]))


def _who(note: Mapping[str, Any]) -> str:
    return f"Process {note['rank']} (pid {note['pid']} on {note['host']})"
