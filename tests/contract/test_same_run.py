"""A seed says everything about a run, and looking at it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import assert_same, assert_same_run, rows, state_of

trainers = pytest.mark.parametrize("name", list(RECIPES))


@trainers
def test_the_same_seed_is_the_same_run(name: str, tmp_path: Path) -> None:
    first, second = (make(name, tmp_path / run) for run in ("first", "second"))
    first.learn()
    second.learn()
    assert_same_run(second, first, tmp_path / "second", tmp_path / "first")


@trainers
def test_another_seed_is_another_run(name: str, tmp_path: Path) -> None:
    first, second = (make(name, tmp_path / str(seed), **{"train.seed": seed}) for seed in (3, 4))
    first.learn()
    second.learn()
    losses = [[row.get("losses/total_loss") for row in rows(tmp_path / str(seed))] for seed in (3, 4)]
    assert losses[0] != losses[1]


@trainers
def test_evaluating_more_often_changes_nothing(name: str, tmp_path: Path) -> None:
    seldom = make(name, tmp_path / "seldom")
    often = make(name, tmp_path / "often", **{"train.eval_interval": 1, "train.checkpoint_interval": 2})
    seldom.learn()
    often.learn()
    expected, got = state_of(seldom), state_of(often)
    for progress in (expected["progress"], got["progress"]):
        progress.pop("best")  # more evaluations may find a better one
    assert_same(got, expected, "state")
    evaluated = set(rows(tmp_path / "often")[1]) - set(rows(tmp_path / "seldom")[1])
    assert RECIPES[name].evaluated in evaluated
    for row, other in zip(rows(tmp_path / "often"), rows(tmp_path / "seldom"), strict=True):
        assert {k: v for k, v in row.items() if k not in evaluated} == {
            k: v for k, v in other.items() if k not in evaluated
        }


@trainers
def test_a_run_that_ends_by_its_epochs_is_evaluated_and_saved(name: str, tmp_path: Path) -> None:
    trainer = make(name, tmp_path)
    trainer.learn()
    step = trainer.progress.step
    assert 0 < step < trainer.config.train.total_steps
    assert RECIPES[name].evaluated in rows(tmp_path)[-1]
    assert rows(tmp_path)[-1]["step"] == step
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == [f"checkpoint_{step:03d}"]
