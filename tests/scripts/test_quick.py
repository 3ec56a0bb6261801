"""What a quick run keeps, by made-up times, and that measuring and choosing work in a real run of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import quick

ROOT = Path(__file__).resolve().parents[2]


def test_cheap_cases_the_first_of_others_and_something_of_each_file() -> None:
    names = ["a.py::cheap[0]", "a.py::cheap[1]", "a.py::some[0]", "a.py::some[1]", "a.py::long", "b.py::x", "b.py::y"]
    seconds = {"a.py::some": quick.CHEAP, "a.py::long": 9.0, "b.py::x": 8.0, "b.py::y": 7.0}
    assert quick.kept(names, seconds) == ["a.py::cheap[0]", "a.py::cheap[1]", "a.py::some[0]", "b.py::y"]


def test_what_is_measured_is_left_out_of_the_next_quick_run(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import time\n\ndef busy():\n    end = time.process_time() + 0.5\n    while time.process_time() < end: ...\n"
        "def test_long(): busy()\ndef test_cheap(): ...\n"
    )
    plugin = ROOT / "tests" / "quick.py"
    (tmp_path / "quick.py").write_text(plugin.read_text())

    def run(option: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "quick", "-p", "no:cacheprovider", "--rootdir=.", option]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "2 passed" in run("--measure")
    measured = json.loads((tmp_path / "durations.json").read_text())
    assert measured == {"test_x.py::test_long": pytest.approx(0.5, abs=0.4)}
    assert "1 passed, 1 deselected" in run("--quick")
