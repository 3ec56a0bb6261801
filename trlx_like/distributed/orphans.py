"""Processes of a run end by themselves when the launcher that started them is gone, however it was killed.

Our launcher holds the writing end of a pipe, and each process the reading end. The kernel closes the former when the
launcher ends, and a thread of each process sees that at once. Linux could also send a signal to the children of a
dead process (PR_SET_PDEATHSIG), but macOS could not, and it forgets a launcher that starts processes from a thread.
torchrun and `accelerate launch` make no such pipe. Their processes look every second whether they have another parent,
which a wrapper around the interpreter can hide from them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

logger = logging.getLogger(__name__)

VARIABLE = "TRLX_LIKE_LAUNCHER"
"""The environment variable with the number of the pipe's reading end."""

GRACE = 8.0
"""Seconds in which a process may save before it ends at once."""


def watch_launcher() -> None:
    """End this process soon after its launcher has ended. Does nothing in a process that no launcher started."""
    handle = os.environ.pop(VARIABLE, None)  # not for processes that this one starts
    if handle is not None:
        threading.Thread(target=_end_after, args=(_read, int(handle)), daemon=True).start()
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        _watch_parent(os.getppid())


@cache  # a process may have several trainers
def _watch_parent(parent: int) -> None:
    threading.Thread(target=_end_after, args=(_wait_for_another, parent), daemon=True).start()


def _read(handle: int) -> None:
    with suppress(OSError):
        os.read(handle, 1)  # returns when the launcher is gone: it writes nothing


def _wait_for_another(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)


def _end_after(wait: Callable[[int], None], launcher: int) -> None:
    wait(launcher)
    logger.warning("The launcher is gone: this process saves and ends.")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE)
    os._exit(143)  # in a step that does not end, or waiting for another process
