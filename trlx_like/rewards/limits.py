"""Time limits of reward functions, and the alarm that enforces one in the process that calls the function."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trlx_like.errors import ConfigError

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds between alarms, for a function that caught the first one."""
STUCK = 5.0
"""Seconds past its limit after which a warning says that a function cannot be interrupted."""


@dataclass(frozen=True)
class Limit:
    """Hold the seconds that a call may take from now on, with the option that sets the limit and its value."""

    seconds: float
    option: str
    granted: float


class Deadline:
    """Measure the time of a function's calls on one batch, from the first of them on.

    Args:
        batch: Seconds for all calls together; None: no limit.
        sample: Seconds for each call; None: no limit.
    """

    def __init__(self, batch: float | None, sample: float | None) -> None:
        self.batch, self.sample = batch, sample
        self._ends: float | None = None

    def begin(self) -> Limit | None:
        """Return the time that a call which begins now may take."""
        limits = []
        if self.sample is not None:
            limits.append(Limit(self.sample, "reward.sample_time_limit", self.sample))
        if self.batch is not None:
            self._ends = time.monotonic() + self.batch if self._ends is None else self._ends
            limits.append(Limit(self._ends - time.monotonic(), "reward.time_limit", self.batch))
        return min(limits, key=lambda limit: limit.seconds, default=None)


class TimeUp(BaseException):
    """Interrupt a function whose time is up. It is no `Exception`, because the function might catch that."""


def check_alarm() -> None:
    """Raise ConfigError if functions cannot be interrupted in this thread or on this system."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "reward.time_limit and reward.sample_time_limit can interrupt a function without workers only in the main "
            "thread of a process, and not on Windows: set reward.workers to 1 or more."
        )


@contextmanager
def alarm(limit: Limit | None, name: str | None) -> Iterator[None]:
    """Interrupt the body of the `with` statement when its time is up.

    Compiled code is interrupted when it returns to Python.

    Args:
        limit: The time; None: no limit.
        name: A function's name, for a warning if the function cannot be interrupted; None: do not warn.

    Raises:
        TimeUp: The time is up; raised wherever the body is.
    """
    if limit is None:
        yield
        return
    if limit.seconds <= 0:
        raise TimeUp
    check_alarm()
    watch = threading.Timer(limit.seconds + STUCK, _say_stuck, (limit, name))
    watch.daemon = True
    before = signal.signal(signal.SIGALRM, _ring)
    if name is not None:
        watch.start()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit.seconds, AGAIN)
            yield
        except BaseExceptionGroup as group:
            if group.subgroup(TimeUp) is None:
                raise
            raise TimeUp from group  # it was raised in a task group of an async function
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        watch.cancel()


def _ring(number: int, frame: FrameType | None) -> None:
    raise TimeUp


def _say_stuck(limit: Limit, name: str | None) -> None:
    logger.warning(
        f"{name} has run for {STUCK:g} s longer than {limit.option} ({limit.granted:g} s) and cannot be interrupted in "
        "this process. With reward.workers: 1 it would run in a process of its own, which can be killed."
    )
