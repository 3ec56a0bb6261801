"""Rounds that nothing can be learned from make no step, are told, and end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import count_letters, make
from tests.contract.runs import rows

FOR_EVER = {"train.epochs": 10**6, "train.max_empty_rounds": 3}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("OnlineDPOTrainer", {}), ("GRPOTrainer", {"method.max_sampling_attempts": 2})],
)
def test_a_task_without_differences_ends(
    name: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer = make(name, tmp_path, reward_fn=lambda outputs, **_: [1.0] * len(outputs), **FOR_EVER, **changes)
        metrics = trainer.learn()
    assert (trainer.progress.step, trainer.progress.round) == (0, 3)
    assert [text for text in caplog.messages if "Nothing of this round" in text] == [
        "Nothing of this round can be learned from, as with equal scores: it passes without a step, and so may 3 in a "
        "row (train.max_empty_rounds)."
    ]
    assert "Training ends at step 0, as nothing of 3 rounds in a row can be learned from" in caplog.text
    assert metrics["rollout/empty_rounds"] == 3
    assert [(row["step"], row.get("rollout/score_mean")) for row in rows(tmp_path)] == [(0, None), (0, 1.0)]


class Now:
    """Counts letters in the first and the fourth round, each of one call; all samples of the others are equal."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def __call__(self, pairs: Any = None, **given: Any) -> list[float]:
        self.calls += 1
        scores = count_letters(given["outputs"])
        return scores if self.calls in (1, 4) else [0.0] * len(scores)


def test_such_rounds_are_counted_until_one_has_a_step(tmp_path: Path) -> None:
    """One step, two rounds without, a step, and three rounds without, which end the run as any other."""
    options = {**FOR_EVER, "train.eval_interval": 1000, "method.chunk_size": 7}
    trainer = make("OnlineDPOTrainer", tmp_path, judge=Now(), reward_fn=None, **options)
    trainer.learn()
    found = [(row["step"], row.get("rollout/empty_rounds")) for row in rows(tmp_path)]
    steps = [step for step, _ in found]
    assert trainer.progress.round == 7 and (tmp_path / f"checkpoint_{trainer.progress.step:03d}").is_dir()
    counted = [(step, count) for step, count in found if count is not None]
    assert counted[0][1] == 2 and counted[-1] == (steps[-1], 3) and len(counted) == 2
    assert steps == sorted(steps) and steps[-1] == steps[-2]
