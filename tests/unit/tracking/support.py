"""The runs that trackers of the tests write, read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trlx_like.tracking import RunInfo
from trlx_like.tracking.jsonl import JsonlTracker


def run_info(directory: Path, **values: Any) -> RunInfo:
    return RunInfo(directory, {"train": {"seed": 1}}, project="tests", total_steps=10, **values)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_time(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time/elapsed"} for row in rows(path)]


def write_run(directory: Path, steps: int) -> None:
    tracker = JsonlTracker(run_info(directory))
    for step in range(1, steps + 1):
        tracker.log({"loss": step / 4}, step)
        tracker.log_table("samples", ["output"], [[f"a{step}"], [f"b{step}"]], step)
    tracker.close()


def run_python(script: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in an own process: these libraries read their settings once, when they are imported."""
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": root, "HOME": str(directory), **environment}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
