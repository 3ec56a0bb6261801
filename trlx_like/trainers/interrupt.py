"""Ctrl-C and SIGTERM: recorded when they arrive, handled after the running optimiser step."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """Exit the process after a signal stopped the run and it was saved: code 130 (Ctrl-C) or 143 (SIGTERM)."""

    code: int


class StopRequest:
    """Record a signal that asks the run to stop.

    Attributes:
        code: 0 until a signal arrives, then the exit code.
    """

    def __init__(self) -> None:
        self.code = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; raise KeyboardInterrupt at the second."""
        if self.code:
            raise KeyboardInterrupt  # asked twice: do not wait for the step to end
        self.code = 128 + number
        logger.warning("Stopping after this step, then saving. Ask again to stop at once, without saving.")


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM within a `with` block, in the StopRequest that it yields.

    In another thread than the main one, signals are handled as usual.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
