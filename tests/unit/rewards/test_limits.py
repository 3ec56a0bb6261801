"""Time limits, of a sample and of a batch, and the alarm that rings in this process."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.unit.rewards import faulty
from tests.unit.rewards.support import MANY, Runners, faults, scores_of
from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.limits import Limit, TimeUp, alarm


@pytest.mark.parametrize("workers", [0, 1])
def test_with_a_limit_a_sample_one_fault_is_one_samples(workers: int, runner: Runners, tmp_path: Path) -> None:
    """The function is called with one sample at a time."""
    own = runner(faulty.hangs, workers=workers, on_error="abstain", sample_time_limit=0.3)
    assert scores_of(own, MANY).rewards == [1.0, None, 3.0] * 2
    assert [line["outputs"] for line in faults(tmp_path)] == [["bad"], ["bad"]]
    assert "reward.sample_time_limit (0.3 s)" in faults(tmp_path)[0]["message"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_limit_of_the_batch_is_over_all_its_calls(workers: int, runner: Runners, tmp_path: Path) -> None:
    """Five hang, of which the first takes all the time there is; what comes after it is not even called."""
    outputs = {"samples": ["x"] * 6, "prompts": ["p"] * 6, "outputs": ["a", *["bad"] * 5]}
    own = runner(faulty.hangs, workers=workers, on_error="abstain", sample_time_limit=60, time_limit=0.3)
    began = time.monotonic()
    assert scores_of(own, outputs).rewards == [1.0, *[None] * 5]
    assert time.monotonic() - began < 30
    assert {line["message"] for line in faults(tmp_path)} == {"hangs took longer than reward.time_limit (0.3 s)."}


def test_limits_without_workers_need_the_main_thread(runner: Runners) -> None:
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            runner(faulty.length, time_limit=1)
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "only in the main thread" in str(caught[0]) and "set reward.workers to 1 or more" in str(caught[0])


def test_the_alarm_leaves_nothing_behind(runner: Runners) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RewardError):
        scores_of(runner(faulty.hangs, time_limit=0.1))
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(TimeUp), alarm(Limit(0.0, "reward.time_limit", 1.0), "x"):
        pytest.fail("the time was over before it began")


def test_what_cannot_be_interrupted_is_named(
    runner: Runners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that swallows every alarm until somebody has said so."""
    monkeypatch.setattr("trlx_like.rewards.limits.STUCK", 0.1)

    def deaf(outputs: list[str]) -> list[float]:
        while "reward.workers: 1" not in caplog.text:
            try:
                time.sleep(0.01)
            except BaseException:
                continue
        return [0.0] * len(outputs)

    with caplog.at_level(logging.WARNING, logger="trlx_like"):
        assert scores_of(runner(deaf, time_limit=0.1)).rewards == [0.0] * 3
    assert "deaf has run for 0.1 s longer than reward.time_limit (0.1 s) and cannot be interrupted" in caplog.text


def test_the_alarm_reaches_through_a_task_group() -> None:
    async def blocks() -> None:
        while True:
            time.sleep(0.01)

    async def several() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(blocks())

    with pytest.raises(TimeUp), alarm(Limit(0.1, "reward.time_limit", 0.1), None):
        asyncio.run(several())
    with pytest.raises(ExceptionGroup, match="other"), alarm(Limit(9.0, "reward.time_limit", 9.0), None):
        raise ExceptionGroup("other", [ValueError()])
