"""ledger.jsonl read back: that each row was used once and only once, and the first line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trlx_like.cli import app
from trlx_like.tracking.ledger import check_ledger


def write(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(text + end)
    return folder


def round_(number: int, epoch: int, *rows: list[int], step: int = 0, of: int | None = 5) -> dict[str, Any]:
    size = {} if of is None else {"of": of}
    return {"step": step or number, "round": number, **size, "epoch": epoch, "rows": list(rows)}


def batch(step: int, epoch: int, *rows: list[int], of: int = 5) -> dict[str, Any]:
    return {"step": step, "of": of, "epoch": epoch, "rows": list(rows)}


RIGHT = {
    "rounds over epochs": [round_(1, 0, [3, 1]), round_(2, 0, [0, 2]), round_(3, 0, [4]), round_(3, 1, [3])],
    "two processes": [round_(1, 0, [3], [1]), round_(4, 0, [0, 2], [4]), round_(5, 1, [4, 3], [2])],
    "a process that seldom has a row": [round_(1, 0, [1], [0], of=2), round_(2, 1, [1], [], of=2)]
    + [round_(3, 1, [0], [], of=2), round_(4, 2, [0], [], of=2)],
    "steps": [batch(1, 0, [1, 3, 0]), batch(2, 0, [4, 2]), batch(3, 1, [2])],
    "a process that is ahead": [batch(1, 0, [0, 2], [3, 1]), batch(2, 0, [4], []), batch(2, 1, [], [1, 3])],
    "calls of a function": [round_(1, 0, [0, 2], [1], of=None), round_(2, 0, [3], [4], of=None)],
}


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_once_and_only_once(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    uses = sum(len(rows) for line in lines for rows in line["rows"])
    sentence, right = check_ledger(write(tmp_path, *lines, end='{"step": 9, "ro'))  # of a killed run
    assert right and f"once and only once: {uses} uses" in sentence


ONCE = [round_(1, 0, [0], of=1), round_(2, 1, [0], of=1)]
WRONG = {
    "twice": ([round_(1, 0, [3, 1]), round_(2, 0, [0, 1])], 2, "row 1 is used twice in epoch 0; before, with step 1"),
    "twice on two processes": ([round_(1, 0, [3], [3])], 1, "row 3 is used twice in epoch 0; before, with step 1"),
    "a round twice": ([round_(1, 0, [3]), round_(1, 0, [3])], 2, "row 3 is used twice"),
    "never": ([round_(1, 0, [0, 1, 3, 4]), round_(2, 1, [0])], 2, "epoch 0 is over, and row 2 was not used in it"),
    "never in an epoch without a line": ([round_(1, 0, [0], of=1), round_(2, 2, [0], of=1)], 2, "epoch 1 is over, and"),
    "a step that uses a row again": ([batch(1, 0, [1, 3]), batch(2, 0, [3])], 2, "row 3 is used twice"),
    "a lost step": ([batch(1, 0, [0, 2], [1]), batch(2, 1, [0], [1])], 2, "epoch 0 is over, and row 3 was not used"),
    "an epoch again": ([*ONCE, round_(3, 0, [0], of=1)], 3, "process 0 goes back to epoch 0"),
    "a process that is late": ([*ONCE, batch(3, 0, [], [0], of=1)], 3, "row 0 is used in epoch 0, which was over"),
    "outside": ([round_(1, 0, [5])], 1, "row 5 is used, and the data has 5"),
    "a round again": ([round_(2, 0, [3]), round_(1, 0, [2], step=3)], 2, "round 1 comes after round 2"),
    "a step again": ([round_(1, 0, [3], step=4), round_(2, 0, [2], step=3)], 2, "step 3 comes after step 4"),
    "a lost call": ([round_(1, 0, [0, 2], of=None)], 1, "call 1 of the function was not used"),
    "another file": ([{"step": 1, "loss": 0.5}], 1, "it is no record of used rows"),
    "no rows": ([{"step": 1, "epoch": 0, "of": 5, "rows": ["ab"]}], 1, "it is no record of used rows"),
}


@pytest.mark.parametrize(("lines", "number", "problem"), WRONG.values(), ids=WRONG)
def test_the_first_wrong_line_is_named(lines: list[dict[str, Any]], number: int, problem: str, tmp_path: Path) -> None:
    sentence, right = check_ledger(write(tmp_path, *lines, round_(9, 9, [9])))
    assert not right and f"ledger.jsonl, line {number} (step {lines[number - 1]['step']}): {problem}" in sentence


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    right = run.invoke(app, ["ledger", str(write(tmp_path, *RIGHT["steps"]))])
    assert (right.exit_code, right.stdout) == (0, "Each row was used once and only once: 6 uses, until step 3.\n")
    torn = run.invoke(app, ["ledger", str(write(tmp_path, batch(1, 0, [1]), end='{"step"\n'))])
    assert (torn.exit_code, torn.stdout) == (4, f"{tmp_path}/ledger.jsonl, line 2: it is damaged.\n")
    for folder, words in ((write(tmp_path), "is empty"), (tmp_path / "none", "has no ledger.jsonl")):
        refused = run.invoke(app, ["ledger", str(folder)])
        assert refused.exit_code == 2 and words in refused.stderr
