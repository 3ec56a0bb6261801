"""Whole sweeps: with a program in place of the training, and once with real runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli_support import TOKENS, TRAIN, ppo_file, run, said, write_yaml
from tests.unit.tracking.support import Page, rows
from trlx_like.sweep import running

# A run whose reward at step s is s - |cliprange - 0.3| * 10 + seed / 10; 0.9 fails, and 0.5 waits for a file.
PROGRAM = """\
import json, os, signal, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
seed, value = int(given["train.seed"]), float(given["method.cliprange"])
assert given["train.push_to_hub"] == "null"
folder = Path(json.loads(given["train.checkpoint_dir"]))
folder.mkdir(exist_ok=True)
def save(*_):
    Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
with open("calls", "a") as calls:
    print(value, seed, os.environ.get("CUDA_VISIBLE_DEVICES"), file=calls)
if value == 0.9:
    sys.exit("too wide\\n  on 4 samples")
while value == 0.5 and not Path("go").exists():
    time.sleep(0.01)
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, 5):
        print(json.dumps({"step": step, "reward/mean": step - abs(value - 0.3) * 10 + seed / 10}), file=file)
(folder / "config.yml").write_text(json.dumps({"method": {"cliprange": value}, "train": {"seed": seed}}))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(running, "COMMAND", [sys.executable, "program.py"])
    monkeypatch.setattr(running, "POLL", 0.02)
    write_yaml(
        tmp_path / "run.yml",
        model={"model_path": "no/model"},
        train={**TRAIN, "trainer": "PPOTrainer"},
        method={"name": "PPOConfig", "gen_kwargs": TOKENS},
    )
    return tmp_path


def write(here: Path, values: list[float], others: dict[str, Any] | None = None, **more: Any) -> None:
    options = {"method.cliprange": values, **(others or {})}
    sweep = {"config": "run.yml", "search": "grid", "options": options, "seeds": [1, 2], **more}
    (here / "sweep.yml").write_text(yaml.safe_dump(sweep))


def calls(folder: Path) -> list[str]:
    return sorted(line.rpartition(" ")[0] for line in (folder / "calls").read_text().splitlines())


def test_a_grid_with_seeds_and_a_trial_that_fails(here: Path) -> None:
    write(here, [0.1, 0.9, 0.3], {"method.gen_kwargs.suppress_tokens": [[1, 2]]}, parallel=2, devices=[3, 5])
    text = said(0, "sweep", "sweep.yml")
    # Steps end at 4: 4 - 2 + 0.1 and 4 - 2 + 0.2; 4 + 0.1 and 4 + 0.2.
    assert "trial 0: reward/mean 2.15 (2.1 to 2.2 over 2 seeds)   method.cliprange=0.1" in text
    # Both seeds fail, and either may be the first.
    assert re.search(r"trial 1: seed [12]: exit code 1: too wide   method.cliprange=0\.9", text)
    assert text.endswith(
        "Best: trial 2: reward/mean 4.15 (4.1 to 4.2 over 2 seeds)   method.cliprange=0.3, "
        "method.gen_kwargs.suppress_tokens=[1, 2]\ntrlx-like train run.yml --set method.cliprange=0.3 "
        "--set 'method.gen_kwargs.suppress_tokens=[1, 2]'\nReport: sweeps/sweep/report.html\n"
    )
    assert {line.rpartition(" ")[2] for line in (here / "calls").read_text().splitlines()} == {"3", "5"}
    page = Page(here / "sweeps" / "sweep" / "report.html")
    table = [(one["number"], one["state"], one["value"], one["seeds"]) for one in page.data["sweep"]["trials"]]
    assert table == [
        (2, "finished", pytest.approx(4.15), 2),
        (0, "finished", pytest.approx(2.15), 2),
        (1, "failed", None, 0),
    ]
    assert [group["label"] for group in page.data["compared"]["groups"]] == ["cliprange=0.3", "cliprange=0.1"]
    # The same command finds nothing left to do, and another sweep does not go into the folder.
    before = calls(here)
    assert said(0, "sweep", "sweep.yml").startswith("Best: trial 2")
    assert calls(here) == before
    write(here, [0.1, 0.9], parallel=2)
    assert "begun with another options" in said(2, "sweep", "sweep.yml")


def test_without_optuna_no_folder_is_made(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, [0.3])
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert 'pip install "trlx-like[sweep]"' in said(2, "sweep", "sweep.yml")
    assert not (here / "sweeps").exists()


def test_all_fail(here: Path) -> None:
    write(here, [0.9])
    assert said(1, "sweep", "sweep.yml").startswith("No trial was finished. trial 0: seed 1: exit code 1: too wide")


@pytest.mark.parametrize(
    ("metric", "guess"), [("mean_reward", "It logged reward/mean"), ("rewards/mean", "Did you mean reward/mean")]
)
def test_a_metric_that_no_run_logs_ends_the_sweep_with_the_first(metric: str, guess: str, here: Path) -> None:
    write(here, [0.3, 0.1], metric=metric)
    text = said(2, "sweep", "sweep.yml")
    assert f"metric ('{metric}'): the first run has ended and logged no such metric. {guess}" in text
    assert calls(here) == ["0.3 1"]


def test_halving_stops_what_is_worse_and_spares_its_other_seeds(here: Path) -> None:
    write(here, [0.3, 0.2, 0.1, 0.4], halving={"first": 2, "factor": 2})
    text = said(0, "sweep", "sweep.yml")
    assert "trial 0: reward/mean 4.15" in text and "trial 2: stopped early at reward/mean 0.1 " in text
    # The second is stopped since one of two goes on; of three, and of four, the best one is still the first.
    assert calls(here) == ["0.1 1", "0.2 1", "0.3 1", "0.3 2", "0.4 1"]


def in_a_process() -> None:
    sys.exit(run("sweep", "sweep.yml").exit_code)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)], ids=["killed", "stopped"])
def test_a_sweep_that_was_killed_or_stopped_goes_on(number: int, code: int, here: Path) -> None:
    """A signal that asks it to stop is passed on, and it ends after its runs have saved."""
    write(here, [0.3, 0.5])
    process = multiprocessing.get_context("fork").Process(target=in_a_process)
    process.start()
    until = time.monotonic() + 100
    while not (here / "calls").exists() or len(calls(here)) < 3:
        assert time.monotonic() < until and process.is_alive()
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert (here / "saved").exists() == (number == signal.SIGTERM)
    (here / "go").touch()
    assert "trial 1: reward/mean 2.15" in said(0, "sweep", "sweep.yml")
    assert calls(here) == ["0.3 1", "0.3 2", "0.5 1", "0.5 1", "0.5 2"]


@pytest.mark.slow  # four real runs, each of which imports torch: 50 CPU seconds
def test_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ppo_file(tmp_path, reward_fn="rewards.py:score")
    sweep = {"config": "ppo.yml", "search": "random", "trials": 2, "seeds": [1, 2], "parallel": 2}
    options = {"optimizer.kwargs.lr": {"low": 1e-4, "high": 1e-3, "log": True}}
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump({**sweep, "options": options}))
    result = run("sweep", "sweep.yml", "--set", "train.total_steps=1")
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "sweeps" / "sweep" / "report.html")
    for trial in page.data["sweep"]["trials"]:
        folders = [tmp_path / "sweeps" / "sweep" / f"{trial['number']:03d}" / f"seed_{seed}" for seed in (1, 2)]
        last = [[row["reward/mean"] for row in rows(one / "metrics.jsonl") if "reward/mean" in row] for one in folders]
        assert trial["value"] == pytest.approx(sum(values[-1] for values in last) / 2)
        config = yaml.safe_load((folders[1] / "config.yml").read_text())
        assert (config["train"]["seed"], config["train"]["total_steps"]) == (2, 1)
        assert float(config["optimizer"]["kwargs"]["lr"]) == trial["point"]["optimizer.kwargs.lr"]
    assert json.loads(page.inside["script"][0])["sweep"]["drawn"] == 2
