"""What a process prepares before it computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from trlx_like.distributed.setup import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
faults = []
for _ in range(42):  # few of which may take new pages: one of ten once did
    torch.empty(2**24).fill_(1)  # 64 MiB, freed at once
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""


def faults(*words: str, **environment: str) -> int:
    """Return how many pages of memory forty steps had to ask the system for."""
    calm = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", STEPS, *words]
    return int(subprocess.run(command, env={**calm, **environment}, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_freed_tensor_makes_room_for_the_next_one() -> None:
    given_back = faults("given back")
    assert given_back > 100  # one a huge page, at the least
    assert faults("kept") < given_back / 10
    assert faults("kept", MALLOC_MMAP_THRESHOLD_="1000000") > given_back / 2  # the user's own choice
