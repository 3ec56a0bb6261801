"""The best evaluation by each kind of metric, and runs that end once they no longer improve."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.contract.runs import rows
from trlx_like.config.train import TrainConfig
from trlx_like.errors import ConfigError
from trlx_like.trainers.best import exhausted, note_best, watched
from trlx_like.trainers.progress import Progress

NAN = math.nan


def options(**changes: Any) -> TrainConfig:
    return TrainConfig.from_dict({"total_steps": 9, "epochs": 1, "batch_size": 4, "trainer": "SFTTrainer", **changes})


@pytest.mark.parametrize(
    ("metrics", "name", "value"),
    [
        ({"reward/mean": 1.0, "metrics/reward": 2.0, "eval/losses/total_loss": 3.0}, None, (1.0, 1.0)),
        ({"metrics/reward": 2.0}, None, (2.0, 1.0)),
        ({"eval/losses/total_loss": 3.0}, None, (3.0, -1.0)),
        ({"reward/mean@temperature=0.5": 1.0, "reward/mean@temperature=1": 3.0}, None, (3.0, 1.0)),
        ({"metrics/x": 5.0}, None, None),
        ({"metrics/x": 5.0, "reward/mean": 1.0}, "metrics/x", (5.0, 1.0)),
        ({"eval/perplexity@a": 5.0, "eval/perplexity@b": 4.0}, "eval/perplexity", (4.0, -1.0)),
    ],
)
def test_the_metric_that_is_watched(metrics: dict[str, float], name: str | None, value: tuple[float, float]) -> None:
    assert watched(metrics, name) == value


def test_a_watched_metric_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"'metrics/y'.*metrics/x"):
        watched({"metrics/x": 5.0}, "metrics/y")


@pytest.mark.parametrize(
    ("mode", "answers", "best"),
    [(None, [False, True, False, False, False, True], 2.0), ("min", [False, True, False, False, True, False], 0.5)],
)
def test_nan_is_never_best(mode: str | None, answers: list[bool], best: float) -> None:
    train, progress = options(best_mode=mode), Progress()
    assert [note_best(train, progress, {"reward/mean": v}) for v in (NAN, 1.0, 1.0, NAN, 0.5, 2.0)] == answers
    assert progress.best == best
    assert not note_best(train, progress, {"metrics/other": 9.0})
    assert not note_best(options(save_best=False), progress, {"reward/mean": 9.0 if mode is None else -9.0})


def test_patience_counts_evaluations_without_enough_improvement() -> None:
    train = options(best_metric="eval/perplexity", early_stopping={"patience": 2, "min_delta": 0.1})
    progress = Progress()
    for value, stale in ((5.0, 0), (4.95, 1), (4.8, 0), (4.8, 1), (NAN, 2)):
        assert not exhausted(train, progress)
        note_best(train, progress, {"eval/perplexity": value})
        assert progress.stale == stale
    assert exhausted(train, progress)
    with pytest.raises(ConfigError, match="early_stopping needs a metric of the evaluation, which reports none"):
        note_best(options(early_stopping={"patience": 2}), progress, {})


@pytest.mark.parametrize(
    "wrong", [{}, {"patience": 0}, {"patience": 1, "epochs": 2}, {"patience": 1, "min_delta": -1.0}, {"patience": True}]
)
def test_mistakes_in_early_stopping(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="early_stopping"):
        options(early_stopping=wrong)


def test_a_run_on_held_out_samples_keeps_its_best_and_ends_early(tmp_path: Path) -> None:
    changes = {
        "train.eval_interval": 1,
        "train.total_steps": 50,
        "train.epochs": 50,
        "train.early_stopping": {"patience": 2},
        "optimizer.kwargs": {"lr": 1e-12},
        "data.eval_split": 0.3,
    }
    trainer = make("SFTTrainer", tmp_path, eval_prompts=None, reward_fn=None, metric_fn=None, **changes)
    trainer.learn()
    assert trainer.progress.step < 50 and trainer.finished and trainer.progress.stale == 2
    logged = rows(tmp_path)
    assert logged[0]["eval/perplexity"] == pytest.approx(math.exp(logged[0]["eval/losses/total_loss"]))
    assert (tmp_path / f"checkpoint_{trainer.progress.step:02}").is_dir()
