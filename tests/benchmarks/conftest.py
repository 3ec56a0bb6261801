"""accelerate remembers the first number format of a process, so each test begins without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import gpu


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    gpu.reset()
    yield
    gpu.reset()
