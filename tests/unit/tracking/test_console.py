"""The terminal: a bar and tables with groups that stand together, or plain lines where it is no terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.unit.tracking.support import run_info
from trlx_like.tracking import RunInfo, Trackers, console, make_trackers
from trlx_like.tracking.console import Headline

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
        view = console.make_console(RunInfo(tmp_path, {}, "tests", 10))
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


def train(trackers: Trackers, steps: int = 10) -> None:
    for step in range(steps + 1):
        metrics: dict[str, float] = {"losses/total_loss": 2.0, "policy/kl": 0.0125, "learning_rate": 1e-5}
        if step % 5 == 0:
            trackers.log_table("samples", ["output", "reward"], [["hi \x1b[31m[red]", 0.5]] * 8, step)
            metrics |= {"reward/mean": step / 20, "metrics/optimality": 0.5}
        trackers.log(metrics, step)


def test_plain_output_is_one_line_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    trackers = make_trackers([], run_info(tmp_path), main=True)
    train(trackers)
    trackers.close()
    out, err = capsys.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)
    assert [re.sub(r" +\(.*\)", "", line) for line in out.splitlines()] == [
        f"step {step}/10  kl 0.0125  loss 2  lr 1e-05  eval {reward}, optimality 0.5 @{step}"
        for step, reward in [(0, "0"), (5, "0.25"), (10, "0.5")]
    ]
    assert re.search(r"\(0:0\d, 0:0\d left\)$", out.splitlines()[1])
    assert err == ""


def test_plain_output_says_something_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = make_trackers([], run_info(tmp_path), main=True)
    trackers.log({"loss": 3.0}, 1)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    trackers.log({"loss": 3.0, "rollout/score_mean": 0.25}, 2)
    assert capsys.readouterr().out.startswith("step 2/10  reward 0.25  loss 3  (")
    trackers.close()
    assert capsys.readouterr().out == ""


def test_the_last_step_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = make_trackers([], run_info(tmp_path), main=True)
    trackers.log({"loss": 3.0}, 10)
    trackers.close()
    assert capsys.readouterr().out.startswith("step 10/10  loss 3  (")


def test_terminal_has_a_bar_tables_and_whole_log_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    handler = logging.StreamHandler()
    logger = logging.getLogger("trlx_like.test")
    logger.addHandler(handler)
    try:
        trackers = make_trackers([], run_info(tmp_path), main=True)
        train(trackers, steps=5)
        logger.warning("a line of the log")
        assert handler.stream is not terminal
        trackers.close()
        assert handler.stream is terminal
    finally:
        logger.removeHandler(handler)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "samples at step 5, 6 of 8 rows" in shown
    assert "hi ?[31m[red]" in shown and "\x1b[31m[red]" not in terminal.getvalue()
    assert "5/10" in shown and "kl 0.0125  loss 2  lr 1e-05  eval 0.25 @5" in shown
    assert "a line of the log\n" in shown
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor is back"


# The headline, from rows as real runs write them.

Rows = list[tuple[int, dict[str, float]]]
STEP = {"losses/total_loss": 0.4, "grad_norm": 2.9, "learning_rate": 1e-5}
EVALUATION = {"reward/mean": 0.872, "reward/std": 0.1, "generation/length": 5.0}
ROUND = {"rollout/abstained_fraction": 0.0, "rollout/score_mean": 1.318, "rollout/score_std": 0.5}
RATIO = {"losses/policy_loss": 0.4, "policy/approx_kl": 0.3, "policy/ratio": 1.0}
PAIRS = {"rewards/chosen": 0.5, "rewards/rejected": 0.25, "rewards/margins": 0.25, "rewards/accuracies": 0.75}
OBJECTIVE = {"objective/kl": 0.5, "objective/scores": 1.0, "policy/kl": 0.125}
HELD_OUT = {"eval/losses/total_loss": 0.7, "eval/rewards/accuracies": 0.625, "eval/rewards/margins": 0.03}

RUNS: dict[str, tuple[Rows, str]] = {
    "PPO": (
        [(0, {**EVALUATION, "metrics/optimality": 0.5}), (36, {**ROUND, "policy/kl": 0.0125}), (37, {**STEP, **RATIO})],
        "reward 1.32  kl 0.0125  loss 0.4  lr 1e-05  eval 0.872, optimality 0.5 @0",
    ),
    "GRPO without a reference": (
        [(0, EVALUATION), (1, {**ROUND, **STEP, **RATIO})],
        "reward 1.32  loss 0.4  lr 1e-05  eval 0.872 @0",
    ),
    "GRPO with a reference": (
        [(1, {**ROUND, **STEP, **RATIO, "policy/kl": 0.0, "losses/kl": 0.0}), (2, {**STEP, "losses/kl": 0.5})],
        "reward 1.32  kl 0  loss 0.4  lr 1e-05",
    ),
    "DDPO with beta": (
        [(1, {**ROUND, **STEP, **RATIO, "losses/kl": 0.5})],
        "reward 1.32  kl 0.5  loss 0.4  lr 1e-05",
    ),
    "Online DPO": (
        [(1, {**ROUND, **STEP, **PAIRS, **OBJECTIVE}), (1, EVALUATION)],
        "reward 1.32  kl 0.125  loss 0.4  lr 1e-05  eval 0.872 @1",
    ),
    "DPO": (
        [(0, {**EVALUATION, **HELD_OUT}), (1, {"data/pairs": 5.0, **STEP, "losses/sigmoid": 0.7, **PAIRS})],
        "accuracy 0.75  margin 0.25  loss 0.4  lr 1e-05  eval 0.872, accuracy 0.625, margin 0.03 @0",
    ),
    "a reward model": (
        [(0, HELD_OUT), (1, {**STEP, **PAIRS, "rewards/mean": 0.1})],
        "accuracy 0.75  margin 0.25  loss 0.4  lr 1e-05  eval accuracy 0.625, margin 0.03 @0",
    ),
    "SFT": (
        [(1, {"data/samples": 5.0, **STEP, "perplexity": 1.4918})],
        "loss 0.4  perplexity 1.49  lr 1e-05",
    ),
    "a sweep": (
        [(0, {"reward/mean@temperature=0.7": 0.5, "reward/mean@temperature=1.0": 0.25}), (1, STEP)],
        "loss 0.4  lr 1e-05  eval reward@temperature=0.7 0.5, reward@temperature=1.0 0.25 @0",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_headline_shows_what_a_run_logs(name: str) -> None:
    rows, expected = RUNS[name]
    headline = Headline()
    for step, metrics in rows:
        evaluated = headline.update(metrics, step)
        assert evaluated == any(metric.startswith(("reward/", "eval/")) for metric in metrics)
    assert headline.text(8) == expected


def test_numbers_are_the_latest_and_an_evaluation_keeps_its_step() -> None:
    headline = Headline()
    headline.update({**EVALUATION, "metrics/a": 1.0, "metrics/b": 2.0}, 0)
    for step in range(1, 9):
        headline.update({**STEP, "rollout/score_mean": step / 8}, step)
    assert headline.text(2) == "reward 1  loss 0.4  lr 1e-05  eval 0.872, a 1 @0"
    headline.update({"reward/mean": 0.5}, 8)
    assert headline.text(2) == "reward 1  loss 0.4  lr 1e-05  eval 0.5 @8"
    headline.update({"reward/mean": float("nan")}, 9)  # all outputs without a reward
    assert headline.text(2) == "reward 1  loss 0.4  lr 1e-05  eval none @9"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_run_shows_its_kl_only_with_a_reference(
    beta: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("GRPOTrainer", tmp_path, **{"method.beta": beta, "train.total_steps": 2}).learn()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 0/2  eval ") and "@0  (" in first
    assert last.startswith("step 2/2  reward ") and "@2  (" in last
    assert ("  kl 0" in last) == bool(beta)
