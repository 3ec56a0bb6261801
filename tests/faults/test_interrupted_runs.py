"""Runs that are stopped, killed or let down by a reward function go on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.contract.recipes import GENERATION, NO_DROPOUT, PROMPTS, RECIPES, count_letters, few, make
from tests.contract.runs import assert_same, rows
from tests.faults import kills, system_calls
from tests.tiny import save_tiny
from trlx_like.errors import RewardError
from trlx_like.tracking.ledger import check_ledger

AUTO = {"train.resume_from_checkpoint": "auto"}
ROOT = Path(__file__).resolve().parents[2]
ROUND = {"train.checkpoint_interval": 3, "train.eval_interval": 4, "train.epochs": 4}

torch.set_num_threads(1)


def start(name: str, folder: Path, changes: Mapping[str, Any]) -> BaseProcess:
    """A run in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_learn, args=(name, folder, changes))
    process.start()
    return process


def _learn(name: str, folder: Path, changes: Mapping[str, Any]) -> None:
    make(name, folder, **changes).learn()


def finish(process: BaseProcess, code: int = 0) -> None:
    process.join(timeout=60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == code


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.002)


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def assert_same_outcome(folder: Path, whole: Path) -> None:
    """The same metrics, samples and, file by file and bit by bit, last checkpoint."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert_same(rows(folder, name), rows(whole, name), name)
    last, expected = (max(run.glob("checkpoint_*")) for run in (folder, whole))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert len(files) > 10
    assert sorted(path.relative_to(last) for path in last.rglob("*") if path.is_file()) == files
    for path in files:
        assert (last / path).read_bytes() == (expected / path).read_bytes(), path


@pytest.fixture(scope="module", params=few(RECIPES))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A trainer's name and the folder of its run that never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(request.param, folder, ROUND))
    return request.param, folder


# SIGINT takes the same way.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(number: int, whole: tuple[str, Path], tmp_path: Path) -> None:
    name, expected = whole
    process = start(name, tmp_path, ROUND | AUTO)
    wait_until(lambda: lines(tmp_path) >= 3)
    assert process.pid is not None
    os.kill(process.pid, number)
    finish(process, 128 + number)
    stopped = rows(tmp_path)[-1]["step"]
    assert max(tmp_path.glob("checkpoint_*")).name == f"checkpoint_{stopped:03d}"
    finish(start(name, tmp_path, ROUND | AUTO))
    assert_same_outcome(tmp_path, expected)


@pytest.mark.parametrize("name", few(kills.trainers(), kept=("DPOTrainer", "PPOTrainer")))
def test_kill_9(name: str, tmp_path: Path) -> None:
    """In a publication, and at a point of another kind; `python -m tests.faults` draws more."""
    chance = random.Random(name)
    expected = kills.whole(name, tmp_path / "whole", 1)
    assert all(expected.events[0].values()) or not system_calls.available()
    assert check_ledger(expected.folder / kills.RUN)[1]
    others = [kind for kind in kills.KINDS if kind != "publish"]
    for kind in (*(["publish"] if system_calls.available() else []), chance.choice(others)):
        point = kills.draw(chance, name, kind, expected.events)
        outcome = kills.attempt(point, expected, tmp_path / kind)
        assert outcome.killed and not outcome.difference, f"{point}: {outcome.difference}"


class Slow:
    """`count_letters`, after a second when the file that it was given exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        if self.file.exists():
            self.file.rename(self.file.with_suffix(".seen"))
            time.sleep(1)
        return count_letters(outputs)


def test_a_signal_while_experience_is_made_rolls_the_round_back(tmp_path: Path) -> None:
    """It comes into the reward function, when half of a round has been sampled."""
    options = {**ROUND, "train.eval_interval": 100, "method.scale_reward": "running"}
    finish(start("PPOTrainer", tmp_path / "whole", options))
    flag = tmp_path / "now"
    changes = {**options, **AUTO, "reward_fn": Slow(flag)}
    process = start("PPOTrainer", tmp_path / "parts", changes)
    wait_until(lambda: lines(tmp_path / "parts") >= 3)
    flag.touch()
    wait_until(flag.with_suffix(".seen").exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    finish(process, 143)
    stopped = rows(tmp_path / "parts")[-1]["step"]
    assert stopped % 4 == 0  # a round is four steps
    finish(start("PPOTrainer", tmp_path / "parts", options | AUTO))
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


class FailsOnce:
    """`count_letters`, but for one call."""

    def __init__(self, call: int) -> None:
        self.calls_left = call

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ConnectionError("the reward server is away")
        return count_letters(outputs)


@pytest.mark.parametrize("in_chunk", [1, 2])
def test_a_reward_that_raises_in_the_third_round(in_chunk: int, tmp_path: Path) -> None:
    """The run is saved as of its last step, the message says whose fault it was, and a repaired function goes on."""
    options = {**ROUND, "train.eval_interval": 100, "train.checkpoint_interval": 1000, "method.target": 0.01}
    whole = make("PPOTrainer", tmp_path / "whole", **options)
    whole.learn()
    broken = make("PPOTrainer", tmp_path / "parts", **options, reward_fn=FailsOnce(1 + 2 * 2 + in_chunk))
    with pytest.raises(RewardError, match=r"FailsOnce raised ConnectionError: the reward server is away") as failure:
        broken.learn()
    assert "prompt: " in str(failure.value) and "output: " in str(failure.value)
    assert broken.progress.step == 8 and not broken.progress.in_round
    assert [path.name for path in (tmp_path / "parts").glob("checkpoint_*")] == ["checkpoint_008"]
    make("PPOTrainer", tmp_path / "parts", **options, **AUTO).learn()
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


def test_the_same_trainer_learns_on_after_a_failed_reward(tmp_path: Path) -> None:
    options = {**ROUND, "train.eval_interval": 100}
    whole = make("PPOTrainer", tmp_path / "whole", **options, reward_fn=FailsOnce(1000))
    whole.learn()
    trainer = make("PPOTrainer", tmp_path / "again", **options, reward_fn=FailsOnce(4))
    with pytest.raises(RewardError):
        trainer.learn()
    trainer.learn()
    assert_same_outcome(tmp_path / "again", tmp_path / "whole")


REWARD = '''
import random

def reward(outputs):
    """Needs python's own random numbers to be restored as well."""
    return [output.count("a") + random.random() for output in outputs]
'''


@pytest.mark.slow
def test_fresh_processes_on_the_command_line(tmp_path: Path) -> None:
    """What a user does: Ctrl-C, the same command again. Nothing is left over in memory from the first process."""
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "model": {"model_path": save_tiny(tmp_path / "model", **NO_DROPOUT)},
        "method": {"name": "PPOConfig", "num_rollouts": 4, "chunk_size": 2, "gen_kwargs": GENERATION},
        "train": {
            **{"trainer": "PPOTrainer", "seq_length": 20, "batch_size": 2, "total_steps": 30, "epochs": 100},
            **{"eval_interval": 7, "resume_from_checkpoint": "auto", "checkpoint_dir": "run"},
        },
        "data": {"prompts": PROMPTS, "reward_fn": f"{tmp_path / 'reward.py'}:reward"},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    assert train(tmp_path, whole.parent).wait(timeout=120) == 0
    process = train(tmp_path, parts.parent)
    wait_until(lambda: lines(parts) >= 9)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert train(tmp_path, parts.parent).wait(timeout=120) == 0
    assert_same_outcome(parts, whole)


def train(folder: Path, here: Path) -> subprocess.Popen[bytes]:
    here.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trlx_like", "train", str(folder / "config.yml")]
    return subprocess.Popen(command, cwd=here, env=environment)
