"""A fresh run in a folder that an earlier one used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.contract.runs import rows
from tests.unit.trainers.test_base import line
from trlx_like.checkpoint.claim import RunFiles


def test_checkpoints_of_an_earlier_run_are_moved_aside(tmp_path: Path) -> None:
    line(tmp_path, {"train.total_steps": 6}).learn()
    line(tmp_path, {"train.total_steps": 2}).learn()
    assert (tmp_path / "checkpoint_2" / "manifest.json").is_file()
    assert not (tmp_path / "checkpoint_6").exists()
    assert (tmp_path / "earlier_1" / "checkpoint_6" / "manifest.json").is_file()
    resumed = line(tmp_path, {"train.total_steps": 4, "train.resume_from_checkpoint": "auto"})
    resumed.learn()
    assert resumed.progress.step == 4
    assert not (tmp_path / "earlier_2").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_place(tmp_path: Path) -> None:
    """Its rows are those that the same run writes again; a run of another configuration finds them set aside."""
    auto: dict[str, Any] = {"train.resume_from_checkpoint": "auto", "train.total_steps": 2}
    line(tmp_path, {"train.total_steps": 2}).learn()
    expected = sorted(path.name for path in tmp_path.iterdir())
    shutil.rmtree(tmp_path / "checkpoint_2")
    with RunFiles(tmp_path).claimed(["config.yml.tmp"]):
        (tmp_path / "config.yml.tmp").write_text("half of")
    line(tmp_path, auto).learn()
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    shutil.rmtree(tmp_path / "checkpoint_2")
    line(tmp_path, auto | {"train.seed": 5}).learn()
    assert [row["step"] for row in rows(tmp_path / "earlier_1")] == [0, 1, 2]
