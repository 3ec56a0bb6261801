"""A seed says everything about a run, and looking at it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conftest import Checked, Whole
from tests.contract.recipes import RECIPES, few, make
from tests.contract.runs import assert_same, rows, state_of

trainers = pytest.mark.parametrize("name", list(RECIPES))


@pytest.mark.parametrize("name", few(RECIPES))
def test_the_seed(name: str, checked: Checked) -> None:
    checked(name).seed()


@pytest.mark.parametrize("name", few(RECIPES))
def test_evaluating_more_often_changes_nothing(name: str, whole: Whole, tmp_path: Path) -> None:
    seldom, folder = whole(name)
    often = make(name, tmp_path, **{"train.eval_interval": 1, "train.checkpoint_interval": 2})
    often.learn()
    expected, got = state_of(seldom), state_of(often)
    for progress in (expected["progress"], got["progress"]):
        progress.pop("best")  # more evaluations may find a better one
    assert_same(got, expected, "state")
    evaluated = set(rows(tmp_path)[1]) - set(rows(folder)[1])
    assert RECIPES[name].evaluated in evaluated
    for row, other in zip(rows(tmp_path), rows(folder), strict=True):
        assert {k: v for k, v in row.items() if k not in evaluated} == {
            k: v for k, v in other.items() if k not in evaluated
        }


@trainers
def test_a_run_that_ends_by_its_epochs_is_evaluated_and_saved(name: str, whole: Whole) -> None:
    trainer, folder = whole(name)
    step = trainer.progress.step
    assert 0 < step < trainer.config.train.total_steps
    assert RECIPES[name].evaluated in rows(folder)[-1]
    assert rows(folder)[-1]["step"] == step
    assert [path.name for path in folder.glob("checkpoint_*")] == [f"checkpoint_{step:03d}"]
