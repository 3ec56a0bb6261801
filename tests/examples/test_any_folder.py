"""Every example finds the package from any folder that it is started in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    file for file in sorted((ROOT / "examples").rglob("*.py")) if '__name__ == "__main__"' in file.read_text("utf-8")
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_program_finds_the_repository_before_it_imports_from_it(program: Path) -> None:
    depth = len(program.relative_to(ROOT).parts) - 1
    statements = [ast.unparse(node) for node in ast.parse(program.read_text("utf-8")).body]
    place = statements.index(f"sys.path.insert(0, str(Path(__file__).resolve().parents[{depth}]))")
    own = [
        at
        for at, line in enumerate(statements)
        if line.startswith(("import trlx_like", "from trlx_like", "from examples"))
    ]
    assert own and min(own) > place


@pytest.mark.parametrize("words", [["examples/randomwalks/ppo.py"], ["examples/maze"]])
def test_programs_start_outside_the_repository(words: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / words[0]), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--seed" in done.stdout and list(tmp_path.iterdir()) == []
