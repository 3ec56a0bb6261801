"""A fresh run in a folder that an earlier one used."""

from __future__ import annotations

from pathlib import Path

from tests.unit.trainers.test_base import line


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
