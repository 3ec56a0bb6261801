"""The scripts that run before anything is installed: when they make, fill, keep and refuse an environment.

The decisions are tested with a stand-in for the two commands (venv and pip), which would need minutes and a
network; one test runs the real commands on a package that needs neither.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.environment import COMPILING, Environment, execute_quietly, refuse_old_python

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


class Commands:
    """Stands in for venv and pip: leaves their files, remembers what was asked, fails when told to."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.made = 0
        self.installed: list[str] = []
        self.compiled = 0
        self.pip_ends: int | BaseException = 0

    def __call__(self, command: Sequence[str], folder: Path) -> tuple[int, str]:
        if "venv" in command:
            self.made += 1
            make_by_hand(self.environment)
            return 0, ""
        assert json.loads(self.environment.record_file.read_text())["complete"] is False
        if command[-1] == COMPILING:
            self.compiled += 1
            return 1, "No module named trlx_like"
        assert "--no-compile" in command
        self.installed.append(command[-1])
        if isinstance(self.pip_ends, BaseException):
            raise self.pip_ends
        return self.pip_ends, "No matching distribution found for torch"


def make_by_hand(environment: Environment, version: str = "{}.{}.0".format(*sys.version_info[:2])) -> None:
    environment.programs.mkdir(parents=True, exist_ok=True)
    environment.python.touch()
    (environment.folder / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    root = tmp_path / "a folder with spaces"
    root.mkdir()
    (root / "pyproject.toml").write_text("[project]")
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    return Environment(root)


@pytest.fixture
def commands(environment: Environment) -> Commands:
    environment.execute = Commands(environment)
    return environment.execute


@pytest.mark.parametrize("unwritten", [False, True])
def test_what_is_imported_is_compiled_where_python_may_not_write_it_later(
    unwritten: bool, environment: Environment, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", unwritten)
    environment.ensure()
    environment.ensure()
    assert commands.compiled == unwritten


def test_a_second_run_makes_and_installs_nothing(environment: Environment, commands: Commands) -> None:
    assert environment.ensure() == environment.python
    assert Environment(environment.root, commands).ensure() == environment.python
    assert (commands.made, commands.installed) == (1, ["."])


def test_extras_are_added_and_never_dropped(environment: Environment, commands: Commands) -> None:
    environment.ensure(["dev"])
    environment.ensure()
    environment.ensure(["wandb"])
    environment.ensure(["dev"])
    assert (commands.made, commands.installed) == (1, [".[dev]", ".[dev,wandb]"])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_with_the_same_extras(
    environment: Environment, commands: Commands, name: str
) -> None:
    environment.ensure(["dev"])
    (environment.root / name).write_text("changed")
    environment.ensure()
    assert (commands.made, commands.installed) == (1, [".[dev]", ".[dev]"])


def test_an_environment_that_was_copied_is_linked_to_its_own_code(environment: Environment, commands: Commands) -> None:
    environment.ensure()
    copy = Environment(environment.root.rename(environment.root.with_name("copy")))
    copy.execute = copied = Commands(copy)
    copy.ensure()
    assert (copied.made, copied.installed) == (0, ["."])


def test_an_interrupted_installation_is_redone_from_scratch(environment: Environment, commands: Commands) -> None:
    commands.pip_ends = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        environment.ensure(["dev"])
    half_a_package = environment.folder / "lib" / "torch"
    half_a_package.mkdir(parents=True)
    commands.pip_ends = 0
    environment.ensure(["dev"])
    assert not half_a_package.exists()
    assert (commands.made, commands.installed) == (2, [".[dev]", ".[dev]"])


def test_a_failing_pip_is_shown_and_leaves_what_was_complete(environment: Environment, commands: Commands) -> None:
    environment.ensure()
    commands.pip_ends = 1
    with pytest.raises(SystemExit, match="(?s)No matching distribution.*check the network"):
        environment.ensure(["dev"])
    environment.ensure()
    assert (commands.made, commands.installed) == (1, [".", ".[dev]"])


def test_a_lost_python_is_replaced(environment: Environment, commands: Commands) -> None:
    environment.ensure(["dev"])
    environment.python.unlink()
    environment.ensure()
    assert (commands.made, commands.installed) == (2, [".[dev]", ".[dev]"])


def test_an_environment_of_another_python_is_replaced(environment: Environment, commands: Commands) -> None:
    environment.ensure()
    record = json.loads(environment.record_file.read_text())
    environment.record_file.write_text(json.dumps({**record, "python": "3.10", "fingerprint": "of 3.10"}))
    environment.ensure()
    assert commands.made == 2


def test_somebody_elses_environment_is_filled_but_not_removed(environment: Environment, commands: Commands) -> None:
    make_by_hand(environment)
    theirs = environment.folder / "theirs.txt"
    theirs.touch()
    commands.pip_ends = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        environment.ensure()
    commands.pip_ends = 0
    environment.ensure()
    assert theirs.exists()
    assert (commands.made, commands.installed) == (0, [".", "."])
    environment.python.unlink()
    with pytest.raises(SystemExit, match="remove it"):
        environment.ensure()


def test_a_folder_that_cannot_be_used_is_refused(environment: Environment, commands: Commands) -> None:
    make_by_hand(environment, version="3.10.13")
    with pytest.raises(SystemExit, match="not a virtual environment of Python"):
        environment.ensure()
    assert commands.installed == []


def test_an_old_python_is_refused_in_one_sentence() -> None:
    refuse_old_python((3, 11))
    with pytest.raises(SystemExit, match=r"^trlx_like needs Python 3\.11 or newer; this is 3\.9\.$"):
        refuse_old_python((3, 9))


BACKEND = """
import zipfile

FILES = {
    "toy.py": "",
    "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: toy\\nVersion: 1.0\\n",
    "toy-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "toy-1.0.dist-info/RECORD": "",
}

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(path, text)
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "toy"
version = "1.0"
"""


def test_the_real_commands_make_an_environment_that_runs_the_package(environment: Environment) -> None:
    (environment.root / "backend.py").write_text(BACKEND)
    (environment.root / "pyproject.toml").write_text(PROJECT)
    python = environment.ensure()
    code, output = execute_quietly([str(python), "-c", "import sys, toy; print(sys.prefix)"], environment.root)
    assert code == 0, output
    assert os.path.samefile(output.strip(), environment.folder)
    sources = [path for path in environment.folder.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(list(environment.folder.rglob("*.pyc"))) > 0.9 * len(sources)


@pytest.mark.parametrize("name", ["browser.py", "environment.py", "demo.py", "test.py", "check.py", "package.py"])
def test_what_runs_before_an_install_uses_the_standard_library_only(name: str) -> None:
    imported = set()
    script = SCRIPTS / name
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= set(sys.stdlib_module_names) | {"browser", "environment", "package"}
