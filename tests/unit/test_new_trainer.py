"""What `trlx-like new-trainer` writes works as written; scripts/package.py tries it with the wheel as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli_support import run, said
from trlx_like.imports import import_file
from trlx_like.rendering import rendered

FILES = ["best_of_trainer.py", "best_of_trainer.yml", "test_best_of_trainer.py"]


def test_the_files_are_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ", ".join(FILES) in said(0, "new-trainer", "best_of")
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES
    texts = [file.read_text() for file in sorted(tmp_path.iterdir())]
    assert all("BestOfTrainer" in text and "{{" not in text for text in texts)
    before = (tmp_path / FILES[0]).stat()
    (tmp_path / FILES[1]).unlink()
    assert f"{FILES[0]} exists already in {tmp_path}" in said(2, "new-trainer", "BestOfTrainer")
    assert not (tmp_path / FILES[1]).exists() and (tmp_path / FILES[0]).stat() == before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("best-of", "new-trainer ('best-of') must be a name of a class in Python"),
        ("../x", "must be a name of a class"),
        ("Trainer", "must be a name of a class"),
        ("ppo", "there is a PPOTrainer already"),
        ("AcceleratePPOTrainer", "there is a PPOTrainer already"),
    ],
)
def test_a_name_that_is_none_or_taken_is_refused(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in said(2, "new-trainer", name)
    assert not [*tmp_path.iterdir()]


def test_the_page_shows_the_trainer_that_is_written() -> None:
    program = rendered("trainer.py.txt", name="My", module="my_trainer").partition('"""\n\n')[2]
    assert f"```python\n{program}```\n" in (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def test_the_written_test_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said(0, "new-trainer", "Kept")
    import_file(tmp_path / "test_kept_trainer.py").test_kept_trainer()


@pytest.mark.learning
def test_the_configuration_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said(0, "new-trainer", "Small")
    said(0, "check", "small_trainer.yml")
    result = run("train", "small_trainer.yml")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "runs" / "small_trainer" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    assert len(rewards) == 5
    assert rewards[0] < 0 and rewards[-1] > 4, rewards  # 7.2 at most
