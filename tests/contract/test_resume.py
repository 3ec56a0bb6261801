"""A run that is stopped at any step boundary and resumed is, bit by bit, the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import RECIPES, make, scenarios
from tests.contract.runs import StopAfter, assert_same, assert_same_run, rows, run_until_stopped, state_of

AUTO = {"train.resume_from_checkpoint": "auto"}


@pytest.mark.parametrize(("name", "changes"), scenarios().values(), ids=scenarios())
def test_stopped_at_any_step(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A recipe as it is stops at each of its steps in turn; a variant stops once, in the middle of its run."""
    whole = make(name, tmp_path / "whole", **changes, **AUTO)  # "auto" without a checkpoint is a fresh start
    whole.learn()
    steps = whole.progress.step
    assert steps >= 5
    for step in [steps // 2] if changes else range(1, steps):
        folder = tmp_path / str(step)
        run_until_stopped(make(name, folder, **changes, callbacks=[StopAfter(step)]))
        resumed = make(name, folder, **changes, **AUTO)
        resumed.learn()
        assert_same_run(resumed, whole, folder, tmp_path / "whole")


@pytest.mark.parametrize("name", list(RECIPES))
def test_more_steps_than_first_asked_for(name: str, tmp_path: Path) -> None:
    changes = {"train.eval_interval": 1, "train.total_steps": 5}
    whole = make(name, tmp_path / "whole", **changes)
    whole.learn()
    make(name, tmp_path / "longer", **changes | {"train.total_steps": 3}).learn()
    longer = make(name, tmp_path / "longer", **changes, **AUTO)
    longer.learn()
    assert_same_run(longer, whole, tmp_path / "longer", tmp_path / "whole")


@pytest.mark.parametrize("name", list(RECIPES))
def test_more_epochs_than_first_asked_for(name: str, tmp_path: Path) -> None:
    changes = {"train.eval_interval": 1, "train.epochs": 3}
    whole = make(name, tmp_path / "whole", **changes)
    whole.learn()
    make(name, tmp_path / "longer", **changes | {"train.epochs": 2}).learn()
    longer = make(name, tmp_path / "longer", **changes, **AUTO)
    longer.learn()
    assert longer.progress.step == whole.progress.step
    assert_same_run(longer, whole, tmp_path / "longer", tmp_path / "whole")


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_finished_run_has_nothing_to_resume(name: str, tmp_path: Path) -> None:
    first = make(name, tmp_path)
    first.learn()
    written = (tmp_path / "metrics.jsonl").read_bytes()
    again = make(name, tmp_path, **AUTO)
    again.learn()
    assert again.progress.step == first.progress.step
    assert (tmp_path / "metrics.jsonl").read_bytes() == written


@pytest.mark.parametrize("name", list(RECIPES))
def test_from_the_path_of_a_checkpoint_into_another_folder(name: str, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "whole", **{"train.checkpoint_interval": 2})
    whole.learn()
    start = tmp_path / "whole" / "checkpoint_002"
    branch = make(name, tmp_path / "branch", **{"train.resume_from_checkpoint": str(start)})
    branch.learn()
    assert_same(state_of(branch), state_of(whole), "state")
    expected = [row for row in rows(tmp_path / "whole") if row["step"] > 2]
    assert_same(rows(tmp_path / "branch"), expected, "metrics.jsonl")


@pytest.mark.parametrize("name", list(RECIPES))
def test_loading_by_hand_and_learning_on(name: str, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "whole", **{"train.checkpoint_interval": 2})
    whole.learn()
    loaded = make(name, tmp_path / "loaded")
    loaded.load(tmp_path / "whole" / "checkpoint_002")
    loaded.learn()
    assert_same(state_of(loaded), state_of(whole), "state")
