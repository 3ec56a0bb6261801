"""Processes of a run end by themselves when the launcher that started them is gone, however it was killed.

The launcher holds the writing end of a pipe, and each process the reading end. The kernel closes the former when the
launcher ends, and a thread of each process sees that at once. Linux could also send a signal to the children of a
dead process (PR_SET_PDEATHSIG), but macOS could not, and it forgets a launcher that starts processes from a thread.
A process that compares its parent's id from time to time would be misled by a wrapper around the interpreter.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress

logger = logging.getLogger(__name__)

VARIABLE = "TRLX_LIKE_LAUNCHER"
"""The environment variable with the number of the pipe's reading end."""

GRACE = 8.0
"""Seconds in which a process may save before it ends at once."""


def watch_launcher() -> None:
    """End this process soon after its launcher has ended. Does nothing in a process that `launch` did not start."""
    handle = os.environ.pop(VARIABLE, None)  # not for processes that this one starts
    if handle is not None:
        threading.Thread(target=_watch, args=(int(handle),), daemon=True).start()


def _watch(handle: int) -> None:
    with suppress(OSError):
        os.read(handle, 1)  # returns when the launcher is gone: it writes nothing
    logger.warning("The launcher is gone: this process saves and ends.")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE)
    os._exit(143)  # in a step that does not end, or waiting for another process
