"""The table of first tries: what counts as learned, and that runs whose results are there are not made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_try
from benchmarks.tasks import TASKS

RESULT: dict[str, Any] = {
    "task": "json",
    "trainer": "grpo",
    "start": 0.25,
    "error": 0.125,
    "kl": 1.26,
    "perplexity": 45.2,
    "cpu": 12.4,
}


def test_two_standard_errors_count_as_learned() -> None:
    just, less = {**RESULT, "end": 0.5, "audit": {}}, {**RESULT, "end": 0.49, "audit": {"heavy KL": 7}}
    first, second, _, sentence = first_try.table([just, less]).splitlines()[2:]
    assert first == "| json | grpo | 0.250 | 0.500 | +2.0 | 1.3 | 45.2 | 12 | - |"
    assert second == "| json | grpo | 0.250 | 0.490 | **+1.9** | 1.3 | 45.2 | 12 | heavy KL (7) |"
    assert sentence == "1 of 2 runs improved by two standard errors; the audit was quiet in 1."


def test_it_goes_on_where_it_was_cut_off_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two runs is in the file; the other is made, in a second, and is there for the next time."""
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    known = {**RESULT, "run": ["json", "grpo", 1, 1, 150.0, {"method.num_prompts": 2}], "end": 0.5, "audit": {}}
    results.write_text(json.dumps(known) + "\n")
    page.write_text(f"before\n{first_try.MARKS[0]}\nold\n{first_try.MARKS[1]}\nafter\n")
    monkeypatch.setattr(first_try, "HELD_OUT", 8)
    options = ["--tasks", "json", "letters", "--trainers", "grpo", "--steps", "1", "--set", "method.num_prompts=2"]
    monkeypatch.setattr("sys.argv", ["first_try", *options, "--results", str(results), "--write", str(page)])
    first_try.main()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["task"], row.get("steps")) for row in rows] == [("json", None), ("letters", 1)]
    assert abs(rows[1]["kl"]) < 1 and 40 < rows[1]["perplexity"] < 60  # one step from weights that know nothing
    monkeypatch.setattr(first_try, "done", None)
    first_try.main()
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert [line.split(" | ")[0] for line in lines[4:6]] == ["| letters", "| json"]


@pytest.mark.parametrize(
    ("name", "output", "row", "score"),
    [
        ("letters", "eabee", {"letter": "e"}, 1.0),
        ("letters", "eabe", {"letter": "e"}, 2 / 3),
        ("digits", "2479", {"wanted": "2478"}, 0.75),
        ("digits", "24780", {"wanted": "2478"}, 0.8),
        ("json", '{"a": 1}', {}, 1.0),
        ("json", '{"a: 1}', {}, 0.6),
        ("rhyme", "cat", {"ending": "at"}, 1.0),
        ("rhyme", "cot", {"ending": "at"}, 0.5),
        ("rhyme", "cob", {"ending": "at"}, 0.2),
        ("rhyme", "", {"ending": "at"}, 0.0),
        ("length", "ab", {"wanted": 4}, 0.5),
        ("arithmetic", "12", {"wanted": 12}, 1.0),
        ("arithmetic", "17", {"wanted": 12}, 0.65),
        ("arithmetic", "1a", {"wanted": 12}, 0.1),
        ("copying", "cd", {"wanted": "cdb"}, 2 / 3),
        ("acrostic", "car axe tin", {"wanted": "cat"}, 1.0),
        ("acrostic", "", {"wanted": "cat"}, 0.0),
        ("forbidden", "The cat and she", {}, 1 / 3),
    ],
)
def test_the_scores_of_the_tasks(name: str, output: str, row: dict[str, Any], score: float) -> None:
    assert TASKS[name].scores([output], **{key: [value] for key, value in row.items()}) == [pytest.approx(score)]


def test_noise_is_in_the_reward_alone() -> None:
    task, outputs = TASKS["noisy letters"], ["eee"] * 200
    rewards = task.reward(1)(outputs, letter=["e"] * 200)
    assert task.scores(outputs, letter=["e"] * 200) == [1.0] * 200
    assert sum(rewards) / 200 == pytest.approx(1.0, abs=0.15) and len(set(rewards)) == 200
