"""Runs of trackio, resumed and read back from its database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tracking.support import run_python

TRACKIO = """
from pathlib import Path
from trlx_like.tracking import RunInfo, make_trackers
state = {}
for resume_step in (None, 1):
    run = RunInfo(Path("mine"), {"seed": 1}, "tests", 10, resume_step=resume_step, state=state)
    run.options = {"trackio": {"group": "mine too"}}
    trackers = make_trackers(["trackio"], run, main=True)
    trackers.log({"reward/mean": 0.25, "bad": float("nan")}, (resume_step or 0) + 1)
    trackers.log_table("samples", ["output"], [["text"]], 2)
    trackers.close()
from trackio.sqlite_storage import SQLiteStorage
assert SQLiteStorage.get_runs("tests") == [state["trackio"]] == ["mine"]
rows = SQLiteStorage.get_logs("tests", "mine")
assert [row["step"] for row in rows if row.get("reward/mean") == 0.25] == [1, 2], rows
assert [row["samples"]["_value"] for row in rows if "samples" in row] == [[{"output": "text"}]] * 2, rows
assert SQLiteStorage.get_run_config("tests", "mine")["_Group"] == "mine too"
print("all is there")
"""


def test_trackio_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = run_python(TRACKIO, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "all is there" in done.stdout, done.stderr
