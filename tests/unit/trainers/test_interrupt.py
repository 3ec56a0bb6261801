"""Signals are noted, not obeyed at once; asked twice, they are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import count_letters, make
from tests.contract.runs import rows
from trlx_like.trainers.interrupt import Interrupted, stop_requests


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_the_handlers_are_put_back(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert request.code == 0
        os.kill(os.getpid(), number)
        assert request.code == code
    assert signal.getsignal(number) is before


def test_asked_twice_it_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_requests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def look() -> None:
        with stop_requests() as request:
            seen.extend((request.code, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [0, before]


class Signal:
    """A reward function that sends signals to its own process in its n-th call."""

    def __init__(self, call: int, times: int = 1) -> None:
        self.call = call
        self.times = times
        self.calls = 0

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        self.calls += 1
        for _time in range(self.times if self.calls == self.call else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return count_letters(outputs)


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    """The signal comes in the first chunk of the first round; the second is not sampled any more."""
    reward = Signal(2)
    with pytest.raises(Interrupted) as stopped:
        make("PPOTrainer", tmp_path, reward_fn=reward).learn()
    assert stopped.value.code == 143
    assert reward.calls == 2
    assert not list(tmp_path.glob("checkpoint_*"))
    assert [row["step"] for row in rows(tmp_path)] == [0]


def test_asked_twice_nothing_is_saved_and_the_files_are_whole(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make("PPOTrainer", tmp_path, reward_fn=Signal(4, times=2)).learn()
    assert not list(tmp_path.glob("checkpoint_*"))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]
