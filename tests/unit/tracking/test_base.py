"""Trackers: what they write, what a resumed run keeps, and that a fresh run loses nothing."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trlx_like.errors import ConfigError, RegistryError, RewardError
from trlx_like.tracking import RunInfo, Trackers, console, make_trackers, register_tracker
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


# metrics.jsonl and samples.jsonl


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


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
        **{"samples.1.jsonl": 2, "samples.2.jsonl": 4, "samples.jsonl": 6},
    }
    assert "kept as metrics.1.jsonl" in caplog.text


# All trackers as one


class Recorder:
    """A plugin's tracker."""

    last: Recorder

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.calls: list[Any] = []
        Recorder.last = self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((dict(metrics), step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.calls.append((name, columns, rows, step))

    def close(self) -> None:
        self.calls.append("closed")


register_tracker("recorder")(Recorder)


def test_a_registered_tracker_gets_everything(tmp_path: Path) -> None:
    trackers = make_trackers(["Recorder"], run_info(tmp_path), main=True)
    trackers.log({"a": torch.tensor(0.25)}, 1)
    trackers.log_table("t", ["x"], [[1]], 1)
    trackers.close()
    trackers.close()
    assert Recorder.last.run.directory == tmp_path
    assert Recorder.last.calls == [({"a": 0.25}, 1), ("t", ["x"], [[1]], 1), "closed"]
    assert type(Recorder.last.calls[0][0]["a"]) is float


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    trackers = make_trackers(["recorder"], run_info(tmp_path / "run"), main=False)
    trackers.log({"a": 1.0}, 1)
    trackers.log_table("t", ["x"], [[1]], 1)
    trackers.close()
    assert not (tmp_path / "run").exists()


def test_all_are_closed_when_one_raises(tmp_path: Path) -> None:
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("disk full")

    good, broken = Recorder(run_info(tmp_path)), Broken(run_info(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        Trackers([good, broken]).close()
    assert good.calls == ["closed"]


def test_a_value_that_is_no_number_names_its_metric(tmp_path: Path) -> None:
    trackers = Trackers([Recorder(run_info(tmp_path))])
    with pytest.raises(RewardError, match=r"metric 'metrics/x' must be one number, got list: \[1, 2\]"):
        trackers.log({"metrics/x": [1, 2]}, 0)


@pytest.mark.parametrize("main", [True, False])
def test_unknown_tracker(tmp_path: Path, main: bool) -> None:
    with pytest.raises(RegistryError, match="unknown tracker 'wandbb'. Did you mean wandb?"):
        make_trackers(["wandbb"], run_info(tmp_path), main)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_missing_package(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, steps=1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for module in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf'train.tracker \("{name}"\).*pip install "trlx-like\[{name}\]"'):
        make_trackers([name], run_info(tmp_path), main=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "metrics.1.jsonl").exists()


# The console


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
        f"step {step}/10  reward {reward}  optimality 0.5  kl 0.0125  loss 2  lr 1e-05"
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
    assert capsys.readouterr().out.startswith("step 2/10  score 0.25  loss 3  (")
    trackers.close()
    assert capsys.readouterr().out == ""


def test_the_last_step_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = make_trackers([], run_info(tmp_path), main=True)
    trackers.log({"loss": 3.0}, 10)
    trackers.close()
    assert capsys.readouterr().out.startswith("step 10/10  loss 3  (")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


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
    assert "5/10" in shown and "reward 0.25  kl 0.0125  loss 2  lr 1e-05" in shown
    assert "a line of the log\n" in shown
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor is back"


# Other people's


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step in (None, 2):
        info = run_info(tmp_path, resume_step=resume_step)
        trackers = make_trackers(["tensorboard"], info, main=True)
        for step in range((resume_step or 0) + 1, 5 if resume_step is None else 4):
            trackers.log({"reward/mean": step / 4, "bad": float("nan")}, step)
        trackers.log_table("samples", ["output"], [["<b>a|b\nc</b>"]], 3)
        trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "| output |\n| --- |\n| &lt;b&gt;a\\|b<br>c&lt;/b&gt; |"
    assert b"seed: 1" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_goes_to_the_logging_dir(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make_trackers(["tensorboard"], run_info(tmp_path / "run", logging_dir=tmp_path / "logs"), main=True).close()
    assert any((tmp_path / "logs").iterdir()) and not (tmp_path / "run" / "tensorboard").exists()


def test_wandb_offline_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    state: dict[str, str] = {}
    for resume_step, reward in [(None, 0.123456), (1, 0.654321)]:
        info = run_info(tmp_path, run_name="mine", tags=["t1"], resume_step=resume_step, state=state)
        trackers = make_trackers(["wandb"], info, main=True)
        trackers.log({"reward/mean": reward, "bad": float("inf")}, (resume_step or 0) + 1)
        trackers.log_table("samples", ["output", "reward"], [["some text", 0.5], ["other", None]], 2)
        trackers.close()
        wandb.teardown()  # until then its service may still be writing
        folders = list((tmp_path / "wandb").glob("offline-run-*"))
        assert folders and all(
            state["wandb"] in folder.name for folder in folders
        )  # two in a second: the other ends in -1
        record = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
        assert all(word in record for word in (str(reward).encode(), b"mine", b"t1", b"reward/mean", b"seed"))
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("media/table/*.json")]
    assert tables[0] == {"columns": ["output", "reward"], "data": [["some text", 0.5], ["other", None]]}


def test_wandb_without_an_account_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "from pathlib import Path; from trlx_like.tracking import *\n"
        "make_trackers(['wandb'], RunInfo(Path('run'), {}, 'p', 1), True)"
    )
    done = run_python(script, tmp_path, WANDB_MODE="online", WANDB_API_KEY="", NETRC=str(tmp_path / "netrc"))
    assert done.stderr.splitlines()[-1].startswith('trlx_like.errors.ConfigError: train.tracker ("wandb") cannot start')
    assert done.stderr.rstrip().endswith("Run `wandb login`, or set WANDB_MODE=offline.")


TRACKIO = """
from pathlib import Path
from trlx_like.tracking import RunInfo, make_trackers
state = {}
for resume_step in (None, 1):
    run = RunInfo(Path("run"), {"seed": 1}, "tests", 10, run_name="mine", resume_step=resume_step, state=state)
    trackers = make_trackers(["trackio"], run, main=True)
    trackers.log({"reward/mean": 0.25, "bad": float("nan")}, (resume_step or 0) + 1)
    trackers.log_table("samples", ["output"], [["text"]], 2)
    trackers.close()
from trackio.sqlite_storage import SQLiteStorage
assert SQLiteStorage.get_runs("tests") == [state["trackio"]] == ["mine"]
rows = SQLiteStorage.get_logs("tests", "mine")
assert [row["step"] for row in rows if row.get("reward/mean") == 0.25] == [1, 2], rows
assert [row["samples"]["_value"] for row in rows if "samples" in row] == [[{"output": "text"}]] * 2, rows
print("all is there")
"""


def test_trackio_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = run_python(TRACKIO, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "all is there" in done.stdout, done.stderr


def run_python(script: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in an own process: these libraries read their settings once, when they are imported."""
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": root, "HOME": str(directory), **environment}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_importing_trackers_imports_none_of_their_libraries() -> None:
    heavy = "('torch', 'wandb', 'tensorboard', 'trackio')"
    done = run_python(f"import sys, trlx_like.tracking; print([m for m in {heavy} if m in sys.modules])", Path.cwd())
    assert done.stdout.strip() == "[]", done.stderr
