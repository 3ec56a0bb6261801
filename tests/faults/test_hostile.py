"""Malformed configurations, data files, models and arguments: each ends in one sentence and exit code 2.

The tables of cases are in `hostile/`. A case is run with `check` and with `train`, since `check` promises to find what
`train` would; a case marked `only: train` needs what `check` leaves out, such as calling a function. A traceback or an
acceptance fails the test.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hostile import world
from tests.faults.hostile.world import table
from tests.unit.cli_support import run
from trlx_like.config import TRAINERS


def cases(name: str) -> list[Any]:
    """The cases of a table of trainers, as parameters: trainer and case."""
    found = [
        pytest.param(trainer, case, id=f"{trainer}: {words}")
        for trainer, own in table(name).items()
        for words, case in own.items()
    ]
    return found


def flat(name: str) -> list[Any]:
    return [pytest.param(case, id=words) for words, case in table(name).items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("hostile")
    world.build(folder)
    return folder


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "place" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("place"))
        monkeypatch.delenv("RANK", raising=False)


def refused(says: str, *words: str, several: bool = False) -> str:
    """One line on stderr with these words, and exit code 2. With `several`, one line for each of several mistakes."""
    result = run(*words)
    shown = f"{' '.join(words)} -> {result.exit_code}: {result.output[-2000:]} {result.exception!r}"
    assert result.exit_code == 2, shown
    lines = [line for line in result.stderr.splitlines() if line.strip("╭╮╰╯─│ ")]
    usage = [line for line in lines if not line.startswith(("Usage: ", "Try "))]
    if several:
        usage = [line for line in lines if says in line]
        assert all(line.startswith(words[1]) for line in lines), shown
    assert len(usage) == 1 or len(usage) < len(lines), shown  # click shows how a command is used
    assert "Traceback" not in result.output, shown
    assert " ".join(says.split()) in " ".join(" ".join(line.strip("│ ") for line in usage).split()), shown
    return result.stderr


def refused_by_both(says: str, marks: list[dict[str, str]], file: str, several: bool = False) -> None:
    only = marks[0]["only"] if marks else None
    for command in ("check", "train"):
        # What is refused with its line was refused by the reading of the file, which both begin with.
        if only in (None, command) and refused(says, command, file, several=several).startswith(f"{file}:"):
            return


def test_every_trainer_has_cases_and_a_run_that_works(place: Path) -> None:
    bases = table("bases")["trainers"]
    assert set(bases) == set(table("configurations")) == set(TRAINERS.names())
    assert sum(len(own) for name in ("configurations", "data", "models") for own in table(name).values()) >= 300
    for trainer in bases:
        world.write_config(place / "working.yml", world.base(trainer))
        result = run("check", "working.yml")
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("trainer", "case"), cases("configurations"))
def test_a_configuration(place: Path, trainer: str, case: list[Any]) -> None:
    changes, says, *marks = case
    world.write_config(place / "case.yml", world.changed(world.base(trainer), changes))
    refused_by_both(says, marks, "case.yml")


@pytest.mark.parametrize("case", flat("texts"))
def test_the_text_of_a_configuration(place: Path, case: list[Any]) -> None:
    text, says = case
    text = world.texts().get(text, text) if isinstance(text, str) else text
    (place / "case.yml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused_by_both(says, [], "case.yml", several=True)


@pytest.mark.parametrize(("trainer", "case"), cases("data"))
def test_data(place: Path, trainer: str, case: list[Any]) -> None:
    files, changes, says, *marks = case
    world.write_data(place, files)
    world.write_config(place / "case.yml", world.changed(world.base(trainer), changes))
    refused_by_both(says, marks, "case.yml")
    for name in files:
        (place / name).unlink()


@pytest.mark.parametrize(("trainer", "case"), cases("models"))
def test_a_model(place: Path, trainer: str, case: list[Any]) -> None:
    changes, says, *marks = case
    changes, values = dict(changes), world.base(trainer)
    source = place / changes.pop("from", values["model"]["model_path"])
    shutil.rmtree(place / "model_copy", ignore_errors=True)
    world.write_model(place / "model_copy", source, changes)
    values["model"]["model_path"] = "model_copy"
    world.write_config(place / "case.yml", values)
    refused_by_both(says, marks, "case.yml")


@pytest.mark.parametrize("case", flat("arguments"))
def test_arguments(place: Path, case: list[Any]) -> None:
    words, says, *marks = case
    refused(says, *("x" * 5000 if word == "LONGNAME" else word for word in words), several=bool(marks))
