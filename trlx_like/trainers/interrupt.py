"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: recorded when they arrive, handled after the running optimiser step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trlx_like.distributed.launcher import STOPPING, handled

logger = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """Exit the process after a signal stopped the run and it was saved: 130 (Ctrl-C), 143 (SIGTERM),
    129 (SIGHUP) or 138 (SIGUSR1, which SLURM sends before the time limit)."""

    code: int


class StopRequest:
    """Record a signal that asks the run to stop.

    Attributes:
        code: 0 until a signal arrives, then the exit code.
    """

    def __init__(self) -> None:
        self.code = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; raise KeyboardInterrupt at the second, unless it is SIGUSR1."""
        if self.code:
            if signal.Signals(number).name == "SIGUSR1":  # a scheduler sends it to launcher and process alike
                return
            raise KeyboardInterrupt  # asked twice: do not wait for the step to end
        self.code = 128 + number
        logger.warning("Stopping after this step, then saving. Ask again to stop at once, without saving.")


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGINT, SIGTERM, SIGHUP and SIGUSR1 within a `with` block, in the StopRequest that it yields.

    A signal that is ignored, as `nohup` does with SIGHUP, stays ignored.

    In another thread than the main one, signals are handled as usual.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with handled([n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN], request.receive):
        yield request
