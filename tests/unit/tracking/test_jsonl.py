"""metrics.jsonl and samples.jsonl: what is written, what a resumed run keeps, and that a fresh run loses nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.unit.tracking.support import rows, run_info, without_time, write_run
from trlx_like.tracking import make_trackers
from trlx_like.tracking.jsonl import JsonlTracker


def test_metrics_are_numbers_on_lines(tmp_path: Path) -> None:
    trackers = make_trackers([], run_info(tmp_path), main=True)
    trackers.log({"a": torch.tensor(0.5), "b": 3, "c": float("nan"), "d": -float("inf"), "e": True}, 0)
    trackers.log({"a": 0.1 + 0.2}, 1)
    trackers.close()
    assert without_time(tmp_path / "metrics.jsonl") == [
        {"step": 0, "a": 0.5, "b": 3, "c": "NaN", "d": "-Infinity", "e": 1},
        {"step": 1, "a": 0.30000000000000004},
    ]


def test_every_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log({"a": 1.0}, 7)
    assert rows(tmp_path / "metrics.jsonl")[0]["step"] == 7
    tracker.close()


def test_samples_of_any_text_and_value_are_read_back(tmp_path: Path) -> None:
    hard = 'line\nend\u2028and\x85quote" \x00 \ud800 ü 🎉'
    tracker = JsonlTracker(run_info(tmp_path))
    tracker.log_table("samples", ["text", "step", "list"], [[hard, 9, [torch.tensor(1.5), None, {2}]]], 2)
    tracker.log_table("other", ["where"], [[Path("a/b")]], 2)
    tracker.close()
    assert rows(tmp_path / "samples.jsonl") == [
        {"step": 2, "table": "samples", "text": hard, "step_": 9, "list": [1.5, None, [2]]},
        {"step": 2, "table": "other", "where": str(Path("a/b"))},
    ]


def test_resume_drops_the_rows_of_later_steps(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    tracker = JsonlTracker(run_info(tmp_path, resume_step=3))
    tracker.log({"loss": 40.0}, 4)
    tracker.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 40.0),
    ]
    assert [row["output"] for row in rows(tmp_path / "samples.jsonl")] == ["a1", "b1", "a2", "b2", "a3", "b3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "metrics.jsonl", "samples.jsonl"]


def test_resume_after_a_kill_at_any_byte_of_a_row(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(whole)):
        metrics.write_bytes(whole[:cut])
        tracker = JsonlTracker(run_info(tmp_path, resume_step=3))
        tracker.log({"loss": 1.0}, 4)
        tracker.close()
        # All of the row but its line end is still a row.
        kept = [1, 2, 3, 4] if cut == len(whole) - 1 else [1, 2, 4]
        assert [row["step"] for row in rows(metrics)] == kept


def test_elapsed_time_goes_on_after_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/elapsed": 100.0}\n{"step": 2, "time/elapsed": 500.0}\n')
    tracker = JsonlTracker(run_info(tmp_path, resume_step=1))
    tracker.log({}, 2)
    tracker.close()
    assert 100.0 <= rows(tmp_path / "metrics.jsonl")[-1]["time/elapsed"] < 130.0


def test_fresh_run_moves_old_files_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (1, 2, 3):
        with caplog.at_level(logging.INFO, logger="trlx_like"):
            write_run(tmp_path, steps)
    found = {path.name: len(rows(path)) for path in tmp_path.iterdir()}
    assert found == {
        **{"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3},
        **{"samples.1.jsonl": 2, "samples.2.jsonl": 4, "samples.jsonl": 6, "ledger.jsonl": 0},
    }
    assert "kept as metrics.1.jsonl" in caplog.text
