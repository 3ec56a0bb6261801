"""The pool: workers stay, are replaced, end with the run, and are given only what can be sent to them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_tokenizer
from tests.unit.rewards import faulty
from tests.unit.rewards.support import GIVEN, RIGHT, Runners, score, scores_of
from tests.unit.rewards.test_worker import runs
from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.runner import OUTPUT_FILE
from trlx_like.rewards.weighted import WeightedRewards


def test_workers_are_other_processes_and_stay(runner: Runners) -> None:
    own = runner(faulty.pid, workers=1)
    first, second = scores_of(own).rewards, scores_of(own).rewards
    assert first == second and first[0] != os.getpid()


def test_a_killed_worker_is_replaced(runner: Runners, tmp_path: Path) -> None:
    """What it printed before its end is not lost."""
    own = runner(WeightedRewards([faulty.pid, faulty.exits]), workers=1, on_error="abstain")
    first, second = (scores_of(own).components["pid"][0] for _ in range(2))
    assert first != second
    assert (tmp_path / OUTPUT_FILE).read_text() == "leaving\nleaving\n"


def test_a_worker_that_ended_while_it_had_nothing_to_do_is_replaced(runner: Runners) -> None:
    own = runner(faulty.pid, workers=1)
    first = scores_of(own).rewards[0]
    assert isinstance(first, float)
    os.kill(int(first), signal.SIGKILL)
    while runs(int(first)):
        time.sleep(0.01)
    assert scores_of(own).rewards[0] != first


def test_no_worker_is_left_behind(runner: Runners) -> None:
    own = runner(faulty.pid, workers=2)
    found = {scores_of(own).rewards[0] for _ in range(4)}
    own.close()
    assert found
    for number in found:
        assert isinstance(number, float)
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def test_closing_does_not_wait_for_what_hangs(runner: Runners, tmp_path: Path) -> None:
    own = runner(faulty.waits, workers=1)
    batches = [own.submit(GIVEN, [{"gate": str(tmp_path)}] * 3) for _ in range(3)]
    began = tmp_path / "began"
    while not (began.exists() and began.read_text()):
        time.sleep(0.01)
    own.close()
    assert began.read_text() == "a\n" and len(batches) == 3


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.3])
def test_closing_at_any_time(seconds: float, runner: Runners, tmp_path: Path) -> None:
    """While the process is being made, imports, or is at work; the next batch gets a new one."""
    own = runner(faulty.waits, workers=1)
    for _ in range(2):
        own.submit(GIVEN, [{"gate": str(tmp_path)}] * 3)
    time.sleep(seconds)
    own.close()
    (tmp_path / "open").touch()
    assert score(own, GIVEN, [{"gate": str(tmp_path)}] * 3).rewards == RIGHT


def test_batches_are_scored_while_this_process_goes_on(runner: Runners, tmp_path: Path) -> None:
    """The second one's call begins before the first one's result was asked for, and before it could end."""
    own = runner(faulty.waits, workers=2)
    batches = [own.submit({name: [name[0]] for name in GIVEN}, [{"gate": str(tmp_path)}]) for _ in range(2)]
    while not (tmp_path / "began").exists() or (tmp_path / "began").read_text() != "o\no\n":
        time.sleep(0.01)
    (tmp_path / "open").touch()
    assert [own.result(batch).rewards for batch in batches] == [[1.0], [1.0]]


def test_the_tokenizer_goes_to_workers(runner: Runners) -> None:
    own = runner(WeightedRewards([faulty.tokens, faulty.Scaled(0.5)]), workers=1)
    scores = scores_of(own, tokenizer=tiny_tokenizer())
    assert scores.components == {"tokens": RIGHT, "Scaled": [0.5, 1.5, 1.5]}


def test_what_cannot_go_to_a_worker(runner: Runners, tmp_path: Path) -> None:
    def inner(outputs: list[str]) -> list[float]:
        return [0.0 for _ in outputs]

    lambda_ = lambda outputs: [0.0 for _ in outputs]  # noqa: E731
    for function in (inner, lambda_, WeightedRewards([faulty.length, lambda_])):
        with pytest.raises(
            ConfigError, match=r"^reward\.workers: .*(inner|<lambda>) cannot be sent .* reward.workers to 0"
        ):
            runner(function, workers=1)
    own = runner(faulty.length, workers=1)
    with pytest.raises(RewardError, match="has a key whose value cannot be sent to reward.workers"):
        score(own, GIVEN, [{"check": inner}] * 3)
