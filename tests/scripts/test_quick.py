"""What a quick run keeps, by made-up times, and that measuring and choosing work in a real run of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import quick

ROOT = Path(__file__).resolve().parents[2]


def test_cheap_cases_the_first_of_others_and_something_of_each_file() -> None:
    names = ["a.py::cheap[0]", "a.py::cheap[1]", "a.py::some[0]", "a.py::some[1]", "a.py::long", "b.py::x", "b.py::y"]
    names += ["new.py::one", "new.py::two"]
    seconds = {"a.py": 9.5, "a.py::some": quick.CHEAP, "a.py::long": 9.0, "b.py": 15.0, "b.py::x": 8.0, "b.py::y": 7.0}
    kept = ["a.py::cheap[0]", "a.py::cheap[1]", "a.py::some[0]", "b.py::y", "new.py::one"]
    assert quick.kept(names, seconds) == kept


def test_measuring_some_files_leaves_what_is_known_of_others() -> None:
    known = {"a.py": 3.0, "a.py::gone": 3.0, "b.py": 2.0, "b.py::x": 2.0}
    cases = {"a.py::new": [0.25, 0.75], "a.py::cheap": [quick.CHEAP / 2]}
    assert quick.updated(known, cases) == {"a.py": 1.02, "a.py::new": 0.5, "b.py": 2.0, "b.py::x": 2.0}


def test_what_is_measured_is_left_out_of_the_next_quick_run(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import time\n\ndef busy():\n    end = time.process_time() + 0.6\n    while time.process_time() < end: ...\n"
        "def test_long(): busy()\ndef test_cheap(): ...\n"
    )
    plugin = ROOT / "tests" / "quick.py"
    (tmp_path / "quick.py").write_text(plugin.read_text())

    def run(option: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "quick", "-p", "no:cacheprovider", "--rootdir=.", option]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "2 passed" in run("--measure")
    measured = json.loads((tmp_path / "durations.json").read_text())
    assert list(measured) == ["test_x.py", "test_x.py::test_long"]
    # The clock of a process and its children ticks every hundredth of a second, and starts before the function.
    assert all(seconds >= 0.5 for seconds in measured.values())
    assert "1 passed, 1 deselected" in run("--quick")
