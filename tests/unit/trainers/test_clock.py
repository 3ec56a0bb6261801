"""Seconds a phase, with clocks that tick when they are told to."""

from __future__ import annotations

import pytest

from trlx_like.trainers import clock


class Time:
    """Both clocks; processor time runs at half the speed."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 2


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    held = Time()
    monkeypatch.setattr(clock, "time", held)
    return held


def test_time_within_an_inner_phase_is_not_the_outer_ones(time: Time) -> None:
    phases = clock.Clock()
    time.now += 10  # of no phase
    with phases("evaluate"):
        time.now += 1
        with phases("generate"):
            time.now += 4
        time.now += 2
    with phases("generate"):
        time.now += 8
    assert phases.lap() == {"time/evaluate": 3, "time/generate": 12}
    assert phases.cpu == {"evaluate": 1.5, "generate": 6}


def test_a_lap_starts_from_nothing_and_processor_time_goes_on(time: Time) -> None:
    phases = clock.Clock()
    for seconds in (1, 2):
        with phases("forward"):
            time.now += seconds
        assert phases.lap() == {"time/forward": seconds}
    assert phases.lap() == {}
    assert phases.cpu == {"forward": 1.5}


def test_an_error_ends_a_phase(time: Time) -> None:
    phases = clock.Clock()
    with pytest.raises(ZeroDivisionError), phases("reward"):
        time.now += 1
        raise ZeroDivisionError
    time.now += 5
    with phases("forward"):
        time.now += 1
    assert phases.lap() == {"time/reward": 1, "time/forward": 1}
