"""The tables of a report: cells as they are, within a limit of size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.tracking.support import make_run, report


def test_huge_evaluations_lose_rows_and_huge_texts_their_end(tmp_path: Path) -> None:
    samples = [{"step": step, "table": "samples", "output": "x" * 30_000} for step in (1, 2) for _ in range(100)]
    [table] = report(make_run(tmp_path / "run", [], samples)).data["tables"]
    assert [one["step"] for one in table["steps"]] == [1, 2]
    assert all(1 <= len(one["rows"]) < one["total"] == 100 for one in table["steps"])
    assert table["steps"][0]["rows"][0] == ["x" * 20_000 + " ... (10000 more characters in samples.jsonl)"]


def test_tables_hold_cells_as_they_are(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"step": 0, "table": "samples", "prompt": "a\nb", "reward": 0.5},
        {"step": 0, "table": "samples", "prompt": "c", "reward": None, "finished": True, "list": [1, 2]},
        {"step": 5, "table": "samples", "prompt": "a\nb", "reward": "NaN"},
        {"step": 5, "table": "others", "x": "half a pair: \ud800"},
    ]
    [table, other] = report(make_run(tmp_path / "run", [], samples)).data["tables"]
    assert table["columns"] == ["prompt", "reward", "finished", "list"]
    assert [(one["step"], one["rows"]) for one in table["steps"]] == [
        (0, [["a\nb", 0.5, None, None], ["c", None, True, "[1, 2]"]]),
        (5, [["a\nb", "NaN", None, None]]),
    ]
    assert (other["name"], other["steps"][0]["rows"]) == ("others", [["half a pair: \ud800"]])
