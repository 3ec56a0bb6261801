"""What the games share: behaviour cloning as the same run, and a trained policy that plays."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import configurations
from examples.maze import task
from examples.play import Episode, Score, cloning, play_trained


def test_the_mean_and_its_standard_error() -> None:
    # 1, 2, 6: mean 3, deviations -2, -1, 3, variance 14 / 2 = 7, error sqrt(7 / 3).
    score = Score.of([1.0, 2.0, 6.0])
    assert (score.mean, score.episodes) == (3, 3)
    assert score.error == pytest.approx((7 / 3) ** 0.5)


def test_cloning_differs_in_the_method_only() -> None:
    ilql = configurations.load("ilql_maze")
    clone = cloning(ilql)
    assert (clone.train.trainer, clone.method.name) == ("SFTTrainer", "SFTConfig")
    assert clone.method.to_dict()["gen_kwargs"] == {"max_new_tokens": 1}
    for section in ("model", "optimizer", "scheduler", "tokenizer"):
        assert getattr(clone, section) == getattr(ilql, section)
    assert clone.train.total_steps == ilql.train.total_steps and clone.train.seed == ilql.train.seed


def test_a_policy_is_trained_and_plays(tmp_path: Path) -> None:
    data, maze = task.default_data(), task.default_maze()
    changes = {"total_steps": 2, "checkpoint_dir": str(tmp_path), "eval_interval": 2, "resume_from_checkpoint": None}
    config = configurations.load("ilql_maze").evolve(train=changes)

    def episodes() -> list[Episode]:
        return [task.Walk(maze, cell) for cell in maze.starts[:2]]

    results = play_trained(config, data.samples[:8], task.rewards()[:8], episodes, {"plain": {}, "led": {"beta": 80}})
    assert [result.name for result in results] == ["plain", "led"]
    for result in results:
        assert result.score.episodes == 2 and -101 <= result.score.mean <= 0
