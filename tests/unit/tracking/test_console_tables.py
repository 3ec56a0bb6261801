"""Tables in the terminal: columns where there is room, groups that stand together, rounds not shown too often."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from trlx_like.tracking import RunInfo, console

COLUMNS = ["group", "prompt", "output", "reward", "reward/brief", "advantage", "length", "finish_reason"]
ROWS: list[list[Any]] = [
    [0, "What do twelve pens cost, if three cost two?", "Eight, of course.", 1.25, 0.25, 0.5, 7, "eos"],
    [0, "What do twelve pens cost, if three cost two?", "Let me think about it", 0.0, 0.0, -0.5, 48, "length"],
    [1, "Say something.", "Something.", None, None, None, 4, "stop"],
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function from a width to the lines of a terminal that has shown the table twice in a minute."""

    def shown(width: int, name: str = "training", seconds: float = 60.0) -> list[str]:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(console, "QUIET_SECONDS", seconds)
        view = console.ConsoleTracker(RunInfo(tmp_path, {}, "tests", 10))
        for step in (1, 2):
            view.log_table(name, COLUMNS, ROWS, step)
        view.close()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).splitlines()

    return shown


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_a_wide_terminal_has_columns_and_one_prompt_a_group(bar: Any) -> None:
    lines = bar(160)
    assert cells(lines) == [
        ["0", ROWS[0][1], "Eight, of course.", "1.25", "0.25", "0.5", "7", "eos"],
        ["", "", "Let me think about it", "0", "0", "-0.5", "48", "length"],
        ["1", "Say something.", "Something.", "", "", "", "4", "stop"],
    ]
    rules = [number for number, line in enumerate(lines) if line.startswith("├")]
    assert len(rules) == 1 and "Say something." in lines[rules[0] + 1]


def test_a_narrow_terminal_has_what_is_short_in_one_column(bar: Any) -> None:
    lines = bar(80)
    assert all(len(line) <= 80 for line in lines)
    found = cells(lines)
    notes = [row[2] for row in found]
    assert notes[:7] == [
        *("group 0", "reward 1.25", "reward brief 0.25", "advantage 0.5", "length 7", "finish reason eos"),
        "reward 0",
    ]
    assert " ".join(row[0] for row in found if row[0]) == f"{ROWS[0][1]} Say something."
    assert "reward None" not in "\n".join(lines) and notes[-3:] == ["group 1", "length 4", "finish reason stop"]


def test_rounds_are_shown_at_most_once_a_minute_and_evaluations_always(bar: Any) -> None:
    headings = [line for line in bar(160) if " at step " in line]
    assert headings == ["training at step 1"]
    assert [line for line in bar(160, seconds=0.0) if " at step " in line] == [
        "training at step 1",
        "training at step 2",
    ]
    assert [line for line in bar(160, "samples") if " at step " in line] == ["samples at step 1", "samples at step 2"]
