"""Ctrl-C and SIGTERM: noted when they come, answered at the next step boundary."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """The run was stopped by a signal and is saved. The process exits with 130 (Ctrl-C) or 143 (SIGTERM)."""

    code: int


class StopRequest:
    """`code` is 0 until a signal asks to stop; then the exit code."""

    def __init__(self) -> None:
        self.code = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.code:
            raise KeyboardInterrupt  # asked twice: do not wait for the step to end
        self.code = 128 + number
        logger.warning("Stopping after this step, then saving. Ask again to stop at once, without saving.")


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within, SIGINT and SIGTERM set the request's code. Outside the main thread signals are left alone."""
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
