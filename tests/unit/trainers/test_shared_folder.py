"""A run folder with other people's files: used beside them, or refused in one sentence before anything is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli_support import ppo_file, said
from tests.unit.trainers.test_base import line


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_two_runs_beside_a_users_files(tmp_path: Path) -> None:
    for name in ("reward_fn.py", "reward_model/config.json", "images/cat.png", "checkpoint_notes/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    mine = contents(tmp_path)
    for _ in range(2):
        line(tmp_path, {"train.total_steps": 2}).learn()
    assert (tmp_path / "earlier_1" / "metrics.jsonl").is_file()
    assert {name: content for name, content in contents(tmp_path).items() if name in mine} == mine


def test_a_users_configuration_is_not_replaced(here: Path) -> None:
    file = ppo_file(here).rename(here / "config.yml")
    before = contents(here)
    for command in ("train", "check"):
        said_so = said(2, command, file, "--set", "train.checkpoint_dir=.")
        assert said_so.startswith("train.checkpoint_dir ('.'): a run would write config.yml, which no run has made")
        assert said_so.count("\n") == 1
    assert contents(here) == before


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ('""', "--set: train.checkpoint_dir: must be the path of a folder, got ''."),
        ('"a\\0b"', "--set: train.checkpoint_dir: the character NUL is not text."),
        ("ppo.yml", "ppo.yml is not a folder."),
        ("ppo.yml/below", "ppo.yml is not a folder."),
    ],
)
def test_what_is_no_folder(here: Path, place: str, message: str) -> None:
    file = ppo_file(here)
    for command in ("train", "check"):
        said_so = said(2, command, file, "--set", f"train.checkpoint_dir={place}")
        assert said_so.endswith(f"{message}\n") and said_so.count("\n") == 1
