"""The plan of a run by its first step, and what `check --deep` refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny import tiny_lm
from tests.unit.cli_support import ppo_file, said
from trlx_like.deep_check import Plan, Watch


def plan(offline: bool = False, round_steps: int = 4, seconds: dict[str, float] | None = None, **train: Any) -> Plan:
    options = {"epochs": 3, "total_steps": 100, "eval_interval": 5, "checkpoint_interval": 4, "save_best": False}
    config = SimpleNamespace(train=SimpleNamespace(**{"keep_checkpoints": None, **options, **train}))
    return Plan.of(SimpleNamespace(config=config, offline=offline, round_steps=round_steps), seconds or {})


def test_a_plan_by_hand() -> None:
    # 3 rounds of 4 steps; evaluations before, at 5, 10 and at the end; checkpoints at 4, 8 and 12.
    spent = {"loading": 1.0, "evaluation": 10.0, "round": 100.0, "step": 1000.0, "checkpoint": 10000.0}
    assert plan(seconds=spent) == Plan(3, 12, 4, 3, 3, 1 + 4 * 10 + 3 * 100 + 12 * 1000 + 3 * 10000)


def test_a_plan_that_total_steps_cut_short() -> None:
    # 2 rounds, the second of 1 step; nothing is evaluated; checkpoints at 4 and 5.
    assert plan(total_steps=5) == Plan(2, 5, 0, 2, 2, 0.0)


def test_a_plan_of_an_offline_method() -> None:
    # Its one round has the 20 steps of all 3 passes.
    assert plan(offline=True, round_steps=20) == Plan(3, 20, 0, 5, 5, 0.0)


def test_the_checkpoints_at_one_time() -> None:
    # Two are kept while a third is written, and the best one while its successor is.
    assert plan(keep_checkpoints=2, checkpoint_interval=1).kept == 3
    assert plan(keep_checkpoints=2, checkpoint_interval=1, save_best=True, seconds={"evaluation": 1.0}).kept == 5
    assert plan(keep_checkpoints=50).kept == 3


def test_the_seconds_of_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the first step is the best, its checkpoint is written between the evaluation and the callback."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch, trainer = Watch(since=0.0), SimpleNamespace()
    for seconds, part in (
        (1, lambda: watch.on_train_begin(trainer)),
        (2, lambda: watch.on_evaluate(trainer, {})),
        (4, lambda: watch.on_experience(trainer, {})),
        (8, lambda: watch.on_step(trainer, {})),
        (2 + 16, lambda: watch.on_save(trainer, tmp_path)),
        (0, lambda: watch.on_evaluate(trainer, {})),
        (16, lambda: watch.on_save(trainer, tmp_path)),
    ):
        now += seconds
        part()
    assert watch.seconds == {"loading": 1, "evaluation": 2, "round": 4, "step": 8, "checkpoint": 16}


def test_a_deep_check_of_a_file(here: Path) -> None:
    lines = said(0, "check", "--deep", ppo_file(here)).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("OK", "model", "EOS", "reward", "time", "memory", "plan", "disk")
    ]
    assert not (here / "run").exists()
    assert not list(here.glob(".trlx_like_check_*"))


def test_a_deep_check_uploads_nothing(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    said(0, "check", "--deep", ppo_file(here), "--set", "train.push_to_hub=me/thing")
    assert "me/thing" not in caplog.text  # offline an upload fails with a warning


def test_a_disk_that_is_too_small(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    line = said(2, "check", "--deep", ppo_file(here)).splitlines()[-1]
    assert line.startswith("train.checkpoint_dir: a checkpoint has ") and "10 B are free" in line
    assert "Set train.keep_checkpoints" in line


def test_an_end_that_is_out_of_reach(here: Path) -> None:
    file = ppo_file(here)
    lm = tiny_lm("llama", tie_word_embeddings=False)
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(200)  # one token has nearly all the probability
    lm.save_pretrained(here / "model")
    lines = said(0, "check", "--deep", file).splitlines()
    (end,) = [line for line in lines if line.startswith("EOS")]
    assert "reached by 0%" in end and end.endswith("Responses will be as long as max_new_tokens")


def test_rewards_that_are_all_the_same(here: Path) -> None:
    file = ppo_file(here)
    (here / "rewards.py").write_text("def score(outputs, **_):\n    return [1.0 for _ in outputs]\n")
    assert "All rewards are the same" in said(0, "check", "--deep", file)


def test_a_reward_function_that_fails_on_real_outputs(here: Path) -> None:
    file = ppo_file(here)
    (here / "rewards.py").write_text("def score(outputs, **_):\n    return [1 / 0 for _ in outputs]\n")
    assert "ZeroDivisionError" in said(2, "check", "--deep", file)
