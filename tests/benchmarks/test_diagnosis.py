"""The audit names planted causes first, in real runs; a quick one here, all of them with `--slow`."""

from __future__ import annotations

import pytest

from benchmarks import diagnosis
from benchmarks.diagnosis import HEALTHY, PLANTS


def test_a_planted_cause_is_named_first() -> None:
    plant = PLANTS["an end that max_new_tokens cuts"]
    result = diagnosis.run(plant, seed=3)
    assert result["found"][0] == plant.cause == "responses cut"
    assert result["words"].startswith("the reward does not rise (rollout/score_mean went from 0 to 0): 9")


@pytest.mark.slow  # 110 CPU seconds
def test_most_causes_are_named_first_and_healthy_runs_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diagnosis", "--seed", "3"])
    diagnosis.main()
    last = capsys.readouterr().out.splitlines()[-1].split()
    named, planted, alarms, healthy = (int(last[place]) for place in (0, 2, 6, 10))
    assert (planted, healthy) == (len(PLANTS), len(HEALTHY)) == (14, 20)
    assert named >= 12 and alarms <= 1
