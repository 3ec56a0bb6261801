"""Whole runs on reward functions that fail: they go on as if the function had abstained, or end with one line."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import PROMPTS, few, make
from tests.contract.runs import StopAfter, assert_same, assert_same_run, rows, run_until_stopped, state_of
from tests.unit.rewards import faulty
from trlx_like import WeightedRewards
from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.images import brightness, jpeg_compressibility
from trlx_like.tracking.console import Bar

torch.set_num_threads(1)

STEPS = {"train.total_steps": 2, "train.eval_interval": 2}
AUTO = {"train.resume_from_checkpoint": "auto"}
GOALS = [{"prompt": text, "goals": {"name": "x"}} for text in PROMPTS]
ABSTAIN = {"reward.on_error": "abstain", "reward.sample_time_limit": 20.0, "prompts": GOALS}


def run(trainer: str, folder: Path, **changes: Any) -> Any:
    made = make(trainer, folder, metric_fn=None, **{**STEPS, **changes})
    made.learn()
    return made


def faults(folder: Path) -> list[dict[str, Any]]:
    file = folder / "reward_faults.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """The samples of evaluations, which stand beside those of rounds."""
    return [row for row in rows(folder, "samples.jsonl") if row["table"] == "samples"]


def without_count(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "rollout/reward_faults"} for row in table]


FAULTS: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "raises": ("PPOTrainer", {}, "raised"),
    "wrong_length": ("GRPOTrainer", {}, "wrong length"),
    "wrong_type": ("PPOTrainer", {}, "wrong type"),
    "nan": ("GRPOTrainer", {}, "not finite"),
    "inf": ("RLOOTrainer", {}, "not finite"),
    "none": ("RFTTrainer", {}, "wrong type"),
    "hangs": ("GRPOTrainer", {"reward.sample_time_limit": 0.5}, "time limit"),
    "hangs_for_good": ("PPOTrainer", {"reward.sample_time_limit": 0.5}, "time limit"),
    "exits": ("PPOTrainer", {}, "died"),
    "hogs": ("PPOTrainer", {"reward.worker_memory": 200}, "memory limit"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_with_faults_is_one_with_abstentions(name: str, tmp_path: Path) -> None:
    """Bit by bit; and each fault is on record with its sample."""
    trainer, options, kind = FAULTS[name]
    expected = run(trainer, tmp_path / "expected", reward_fn=faulty.even, prompts=GOALS)
    workers = int(name not in ("wrong_type", "nan", "hangs"))
    changes = {**ABSTAIN, **options, "reward.workers": workers}
    got = run(trainer, tmp_path / "got", reward_fn=faulty.Odd(name), **changes)
    assert_same(state_of(got), state_of(expected), "state")
    assert_same(without_count(rows(tmp_path / "got")), without_count(rows(tmp_path / "expected")))
    assert_same(rows(tmp_path / "got", "samples.jsonl"), rows(tmp_path / "expected", "samples.jsonl"))
    found = faults(tmp_path / "got")
    assert found and {(line["kind"], line["count"]) for line in found} == {(kind, 1)}
    assert all(len(line["outputs"][0]) % 2 for line in found)
    counted = sum(row.get("rollout/reward_faults", 0) for row in rows(tmp_path / "got"))
    assert 0 < counted == len(found) - sum(len(row["output"]) % 2 for row in evaluated(tmp_path / "got"))
    assert not faults(tmp_path / "expected")


@pytest.mark.parametrize("name", ["prints", "mutates"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_function_does_beside_its_work_does_no_harm(
    name: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"prompt": text, "goals": {"name": "x"}} for text in PROMPTS]
    expected = run("PPOTrainer", tmp_path / "expected", reward_fn=faulty.length, prompts=prompts)
    capfd.readouterr()
    changes = {"reward.workers": workers, "prompts": prompts}
    got = run("PPOTrainer", tmp_path / "got", reward_fn=getattr(faulty, name), **changes)
    assert_same_run(got, expected, tmp_path / "got", tmp_path / "expected")
    assert prompts == GOALS
    shown = capfd.readouterr().out.splitlines()
    progress = [line for line in shown if line.startswith("step ")]
    assert len(progress) == 2 and all(re.fullmatch(r"step \d/2  .*eval \S+ @\d  \(0:\d.*\)", line) for line in progress)
    assert workers == 0 or shown == progress


def test_prints_go_around_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a terminal: what a function prints in this process is a line of its own above the bar."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr("trlx_like.tracking.console.Lines", Bar)

    def says(outputs: list[str]) -> list[float]:
        print("seen:", len(outputs))
        return faulty.length(outputs)

    run("PPOTrainer", tmp_path, reward_fn=says)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"(^|[\r\n])seen: 3\r?\n", text)
    assert not re.search(r"training[^\r\n]*seen:", text)


def test_what_is_scored_once_is_what_is_stored(tmp_path: Path) -> None:
    """A function that counts: every number is of one sample, and no sample has been scored twice."""
    changes = {"train.rollout_logging_dir": tmp_path / "rollouts", "reward.workers": 1}
    trainer = run("PPOTrainer", tmp_path, reward_fn=faulty.counts, **changes)
    seen = [row["reward"] for row in evaluated(tmp_path)]
    files = sorted((tmp_path / "rollouts").glob("*.jsonl"))
    sampled = [json.loads(line)["reward"] for file in files for line in file.read_text().splitlines()]
    assert sorted(seen + sampled) == list(range(1, len(seen + sampled) + 1))
    scored = [float(element.scores.sum()) for element in trainer.store.elements]
    assert scored == sampled[-len(scored) :] and len(scored) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_by_default_a_fault_ends_the_run_with_one_message(workers: int, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"^Odd raised ValueError: no reward for bad\n(.*\n)*  output: ") as error:
        run("PPOTrainer", tmp_path, reward_fn=faulty.Odd("raises"), **{"reward.workers": workers})
    (line,) = faults(tmp_path)
    assert line["message"] == str(error.value).splitlines()[0] and "in raises\n" in line["traceback"]
    assert str(error.value).endswith(f"traceback: in {tmp_path}/reward_faults.jsonl") == bool(workers)


def test_too_many_abstentions(tmp_path: Path) -> None:
    changes = {"reward_fn": faulty.Odd("raises"), **ABSTAIN, "reward.max_abstained": 0.01}
    with pytest.raises(
        RewardError, match=r"^\d of 3 samples have no reward, after \d faults \(reward_faults\.jsonl\);"
    ):
        run("PPOTrainer", tmp_path / "evaluation", **changes)
    changes = {"reward_fn": Later(), "reward.max_abstained": 0.5}
    with pytest.raises(RewardError, match=r"^5 of 5 samples have no reward; reward\.max_abstained is 0\.5\.$"):
        run("PPOTrainer", tmp_path / "round", **changes)
    assert len(rows(tmp_path / "round")) == 1


class Later:
    """Abstains after the first call, which is an evaluation."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, outputs: list[str]) -> list[float | None]:
        return [None if calls else 1.0 for calls in [next(self.calls)] for _ in outputs]


def test_all_that_abstain_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"abstained \(None\) from all 5 samples"):
        run("PPOTrainer", tmp_path, reward_fn=Later())


# Several functions.


def test_each_component_is_a_column_and_a_metric(tmp_path: Path) -> None:
    functions = [faulty.even, faulty.vowels]
    changes = {"reward_fn": functions, "reward.weights": [0.5, 2.0], "train.rollout_logging_dir": tmp_path / "rollouts"}
    run("PPOTrainer", tmp_path, **changes, **{"train.epochs": 1})
    table = [row for row in evaluated(tmp_path) if row["step"] == 0]
    assert [row["reward/vowels"] for row in table] == faulty.vowels([row["output"] for row in table])
    assert [row["reward/even"] for row in table] == faulty.even([row["output"] for row in table])
    assert any(row["reward/even"] is None for row in table)
    for row in table:
        assert row["reward"] == 2.0 * row["reward/vowels"] + 0.5 * (row["reward/even"] or 0.0)
    first, second, *_ = rows(tmp_path)
    assert first["reward/vowels/mean"] == pytest.approx(sum(row["reward/vowels"] for row in table) / len(table))
    known = [row["reward/even"] for row in table if row["reward/even"] is not None]
    assert first["reward/even/mean"] == pytest.approx(sum(known) / len(known))
    lines = [json.loads(line) for line in next((tmp_path / "rollouts").iterdir()).read_text().splitlines()]
    assert second["rollout/reward/vowels/mean"] == pytest.approx(sum(line["reward/vowels"] for line in lines) / 5)
    assert second["rollout/abstained_fraction"] == 0 and second["rollout/score_mean"] == pytest.approx(
        sum(line["reward"] for line in lines) / 5
    )
    assert '"reward/vowels"' in (tmp_path / "report.html").read_text()


def test_a_list_is_the_same_run_as_weighted_rewards(tmp_path: Path) -> None:
    weighted = WeightedRewards([faulty.length, faulty.vowels], [0.5, 2.0])
    first = run("GRPOTrainer", tmp_path / "first", reward_fn=weighted)
    changes = {"reward_fn": [faulty.length, faulty.vowels], "reward.weights": [0.5, 2.0], "reward.workers": 2}
    second = run("GRPOTrainer", tmp_path / "second", **changes)
    assert_same_run(second, first, tmp_path / "second", tmp_path / "first")


# Workers.


class Gate:
    """Lets the reward function go on when the policy is asked for its next chunk, and notes what came when."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.folder = folder
        self.sample = trainer.sampler.sample
        self.events: list[str] = []

    def __call__(self, *given: Any, **options: Any) -> Any:
        began = self.folder / "began"
        if self.events:
            until = time.monotonic() + 60
            while not (began.exists() and began.read_text()) and time.monotonic() < until:
                time.sleep(0.01)
            self.events.append(f"generates while {len(began.read_text().splitlines())} is being scored")
            (self.folder / "open").touch()
        else:
            self.events.append("generates")
        return self.sample(*given, **options)


def test_a_chunk_is_scored_while_the_next_is_generated(tmp_path: Path) -> None:
    """The function does not return before the second chunk is asked for: without overlap this would not end."""
    prompts = [{"prompt": text, "gate": str(tmp_path)} for text in PROMPTS]
    changes = {"reward_fn": faulty.waits, "reward.workers": 1, "reward.time_limit": 60.0, "prompts": prompts}
    trainer = make("PPOTrainer", tmp_path / "run", **STEPS, **changes)
    gate = trainer.sampler.sample = Gate(trainer, tmp_path)
    trainer.make_experience()
    trainer.scoring.close()
    assert gate.events == ["generates", "generates while 1 is being scored"]
    assert len(trainer.store) == 5


@pytest.mark.parametrize("name", few(["PPOTrainer", "RFTTrainer", "OnlineDPOTrainer", "DDPOTrainer"]))
def test_a_run_with_workers_is_the_run_without(name: str, tmp_path: Path) -> None:
    changes = {"reward_fn": faulty.vowels, "train.epochs": 3, "train.total_steps": 6}
    if name == "DDPOTrainer":
        changes |= {"reward_fn": [brightness, jpeg_compressibility], "method.image_type": "pil"}
    if name == "OnlineDPOTrainer":
        changes |= {"judge": faulty.Longest(), "reward_fn": None}
    without = run(name, tmp_path / "without", **changes)
    withw = run(name, tmp_path / "with", **changes, **{"reward.workers": 2})
    assert_same_run(withw, without, tmp_path / "with", tmp_path / "without")
    assert without.progress.step >= 2


@pytest.mark.parametrize("workers", [0, 1])
def test_judges_of_training_and_evaluation_have_the_same_runner(workers: int, tmp_path: Path) -> None:
    """A judge that fails has no opinion: on a group of the round, or on how an answer compares with a reference."""
    prompts = [{"prompt": text, "reference": "abc"} for text in PROMPTS]
    changes = {"judge": faulty.Picky(), "reward_fn": None, "eval_prompts": prompts, "reward.workers": workers}
    run("OnlineDPOTrainer", tmp_path, **changes, **{name: ABSTAIN[name] for name in ABSTAIN if name != "prompts"})
    table = [row for row in evaluated(tmp_path) if row["step"] == 0]
    for row in table:
        length = len(row["output"])
        assert row["metrics/win_rate"] == (None if length % 2 else 0.0 if length < 3 else 1.0)
    assert {len(row["output"]) % 2 for row in table} == {0, 1}
    first, second, *_ = rows(tmp_path)
    known = [row["metrics/win_rate"] for row in table if row["metrics/win_rate"] is not None]
    assert first["metrics/win_rate"] == sum(known) / len(known)
    assert second["rollout/unjudged"] > 0 and {line["function"] for line in faults(tmp_path)} == {"Wins", "GroupReward"}


def test_a_resumed_run_with_workers_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    changes = {"reward_fn": faulty.Odd("exits"), **ABSTAIN, "reward.workers": 1, "train.total_steps": 4}
    whole = make("PPOTrainer", tmp_path / "whole", **changes, **AUTO)
    whole.learn()
    run_until_stopped(make("PPOTrainer", tmp_path / "parts", **changes, callbacks=[StopAfter(3)]))
    resumed = make("PPOTrainer", tmp_path / "parts", **changes, **AUTO)
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")


def test_a_signal_while_a_chunk_is_being_scored(tmp_path: Path) -> None:
    """Nobody waits for it any more: its worker is killed, and the run is saved as it was before the round."""
    prompts = [{"prompt": text, "gate": str(tmp_path)} for text in PROMPTS]
    options = {"train.epochs": 9, "train.total_steps": 9, "reward.workers": 1, "prompts": prompts}
    trainer = make("PPOTrainer", tmp_path / "run", metric_fn=None, reward_fn=faulty.length, **options)
    asked = itertools.count(1)
    sample = trainer.sampler.sample

    def interrupting(*given: Any, **choice: Any) -> Any:
        if next(asked) == 4:  # the first chunk of the second round, after the evaluation and the two of the first
            trainer.reward_fn = faulty.waits
            signal.raise_signal(signal.SIGTERM)
        return sample(*given, **choice)

    trainer.sampler.sample = interrupting
    run_until_stopped(trainer)
    steps = trainer.progress.step
    assert steps > 0 and [path.name for path in (tmp_path / "run").glob("checkpoint_*")] == [f"checkpoint_{steps}"]
    assert not (tmp_path / "open").exists() and not faults(tmp_path / "run")


def test_an_earlier_runs_faults_are_moved_aside(tmp_path: Path) -> None:
    for _ in range(2):
        run("PPOTrainer", tmp_path, reward_fn=faulty.Odd("nan"), **ABSTAIN)
    assert faults(tmp_path) and faults(tmp_path / "earlier_1")
    assert not (tmp_path / "earlier_2").exists()


def test_what_cannot_run_is_said_before_a_model_loads(tmp_path: Path) -> None:
    nowhere = {"model.model_path": str(tmp_path / "nowhere"), "reward.workers": 1}
    with pytest.raises(ConfigError, match=r"^reward\.workers: .*<lambda> cannot be sent to another process"):
        make("PPOTrainer", tmp_path, reward_fn=lambda outputs: [0.0], **nowhere)
    with pytest.raises(ConfigError, match="reward.weights have one for each: 1 functions, 2 weights"):
        make("PPOTrainer", tmp_path, reward_fn=[faulty.length], **{**nowhere, "reward.weights": [1, 2]})
