"""A run that is stopped at any step boundary and resumed is, bit by bit, the run that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.conftest import Checked, Whole
from tests.contract.recipes import OF_THEIR_OWN, RECIPES, checks, few, make, scenarios
from tests.contract.runs import assert_same, assert_same_run, rows, state_of

AUTO = {"train.resume_from_checkpoint": "auto"}
EVERY_SECOND = {"train.checkpoint_interval": 2}


@pytest.mark.parametrize("name", few(RECIPES))
def test_stopped_at_every_step(name: str, checked: Checked) -> None:
    """A run that is stopped after each of its steps, by as many processes as it has steps."""
    assert checked(name).whole.progress.step >= 5
    checked(name).resume()


@pytest.mark.parametrize("scenario", few(scenarios(), kept=(*RECIPES, *OF_THEIR_OWN)))
def test_stopped_once(scenario: str) -> None:
    """The recipes and their variants, stopped in the middle."""
    name, changes = scenarios()[scenario]
    checks(name, **changes).resume(stops=1)


@pytest.mark.parametrize("name", few(RECIPES))
def test_more_steps_than_first_asked_for(name: str, tmp_path: Path) -> None:
    changes = {"train.eval_interval": 1, "train.total_steps": 5}
    whole = make(name, tmp_path / "whole", **changes)
    whole.learn()
    make(name, tmp_path / "longer", **changes | {"train.total_steps": 3}).learn()
    longer = make(name, tmp_path / "longer", **changes, **AUTO)
    longer.learn()
    assert_same_run(longer, whole, tmp_path / "longer", tmp_path / "whole")


@pytest.mark.parametrize("name", few(RECIPES, kept=("DPOTrainer", "PPOTrainer")))
def test_more_epochs_than_first_asked_for(name: str, tmp_path: Path) -> None:
    changes = {"train.eval_interval": 1, "train.epochs": 3}
    whole = make(name, tmp_path / "whole", **changes)
    whole.learn()
    make(name, tmp_path / "longer", **changes | {"train.epochs": 2}).learn()
    longer = make(name, tmp_path / "longer", **changes, **AUTO)
    longer.learn()
    assert longer.progress.step == whole.progress.step
    assert_same_run(longer, whole, tmp_path / "longer", tmp_path / "whole")


@pytest.mark.parametrize("name", few(RECIPES))
def test_a_finished_run_has_nothing_to_resume(name: str, tmp_path: Path) -> None:
    first = make(name, tmp_path)
    first.learn()
    written = (tmp_path / "metrics.jsonl").read_bytes()
    again = make(name, tmp_path, **AUTO)
    again.learn()
    assert again.progress.step == first.progress.step
    assert (tmp_path / "metrics.jsonl").read_bytes() == written


@pytest.mark.parametrize("name", few(RECIPES))
def test_from_the_path_of_a_checkpoint_into_another_folder(name: str, whole: Whole, tmp_path: Path) -> None:
    expected, folder = whole(name, **EVERY_SECOND)
    start = folder / "checkpoint_002"
    branch = make(name, tmp_path / "branch", **{"train.resume_from_checkpoint": str(start)})
    branch.learn()
    assert_same(state_of(branch), state_of(expected), "state")
    assert_same(rows(tmp_path / "branch"), [row for row in rows(folder) if row["step"] > 2], "metrics.jsonl")


@pytest.mark.parametrize("name", list(RECIPES))
def test_loading_by_hand_and_learning_on(name: str, whole: Whole, tmp_path: Path) -> None:
    expected, folder = whole(name, **EVERY_SECOND)
    loaded = make(name, tmp_path / "loaded")
    loaded.load(folder / "checkpoint_002")
    loaded.learn()
    assert_same(state_of(loaded), state_of(expected), "state")
