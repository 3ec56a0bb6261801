"""Time per phase of training: wall-clock seconds for the log, CPU seconds for benchmarks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measure the seconds spent in named phases.

    Phases may nest: while an inner phase runs, no time is added to the outer one.
    """

    def __init__(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self.changes = 0  # how often a phase began or ended
        self._since = (time.perf_counter(), time.process_time())

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of a `with` block to a phase."""
        self._charge()
        self._running.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        """Add the time since the last call to the running phase."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.changes += 1
        if self._running:
            self.wall[self._running[-1]] += wall - self._since[0]
            self.cpu[self._running[-1]] += cpu - self._since[1]
        self._since = (wall, cpu)

    @property
    def phase(self) -> str:
        """The phase that is running; "" between phases."""
        return self._running[-1] if self._running else ""

    def lap(self) -> dict[str, float]:
        """Return the wall-clock seconds of each phase since the last call, under "time/<phase>"."""
        metrics = {f"time/{phase}": seconds for phase, seconds in self.wall.items()}
        self.wall.clear()
        return metrics
