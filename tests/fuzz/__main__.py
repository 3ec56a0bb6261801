"""Try many drawn cases: python -m tests.fuzz --examples 10000 [--seed 0] [NAME ...]. An example is up to 21 cases.

Prints for each kind of case how many were tried and how long it took. Ends with 1 and the smallest case found if one
ends in anything but a result or an error that the user can correct.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed as seeded, settings

from tests.fuzz.cases import CASES


def tried(name: str, folder: Path, *, examples: int, seed: int) -> int:
    """Try cases of one kind, and return how many; raises what a case raises, for the smallest such example."""
    strategy, run = CASES[name]
    count = 0

    @seeded(seed)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def cases(drawn: Any) -> None:
        nonlocal count
        count += run(folder, drawn)

    cases()
    return count


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES), help=f"kinds of cases: {', '.join(CASES)}")
    parser.add_argument("--examples", type=int, default=1000, help="examples of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    asked = parser.parse_args()
    logging.getLogger("trlx_like").setLevel(logging.CRITICAL)
    failed = 0
    for name in asked.names:
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = f"{tried(name, Path(folder), examples=asked.examples, seed=asked.seed)} cases, none unhandled"
            except Exception:
                failed = 1
                said = f"a case that is not handled:\n{traceback.format_exc()}"
        print(f"{name}: {said} ({time.process_time() - started:.0f} s of processor time)", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
