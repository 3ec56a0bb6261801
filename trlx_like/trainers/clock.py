"""Where the time goes: wall seconds a phase for the log, CPU seconds for benchmarks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds spent in named phases. Phases may nest; the inner one's time is not the outer one's too."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = (time.perf_counter(), time.process_time())

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._running.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._running:
            self.wall[self._running[-1]] += wall - self._since[0]
            self.cpu[self._running[-1]] += cpu - self._since[1]
        self._since = (wall, cpu)

    def lap(self) -> dict[str, float]:
        """Wall seconds a phase since the last lap, under "time/<phase>"."""
        metrics = {f"time/{phase}": seconds for phase, seconds in self.wall.items()}
        self.wall.clear()
        return metrics
