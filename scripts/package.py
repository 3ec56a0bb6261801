"""`python scripts/package.py`: builds sdist and wheel, and tries the wheel as a user would have it.

The wheel is installed without its dependencies into an empty virtual environment in a temporary folder. A .pth file
there names the site-packages of `.venv`, so that the dependencies are found and nothing is downloaded twice. In that
folder, where nothing of the repository is in reach, these have to work on a tiny model: `trlx-like doctor`, the one
call of the README, and the three files that `trlx-like new-trainer` writes. Then basedpyright (standard) and mypy (no
plugins, not strict) read every program of the pages and every example, with the wheel's types.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from environment import ROOT, TEST_EXTRAS, Environment, execute_quietly, say

BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
MODEL = "import sys; from pathlib import Path; from tests.tiny import save_tiny; save_tiny(Path(sys.argv[1]))"
# Both checkers have to object to lines 2 and 4: otherwise they do not see the types of the wheel.
CANARY = """import trlx_like
trlx_like.PPOConfig(no_such_option=1)
trainer = trlx_like.train()
trainer.no_such_member
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def build(python: Path, folder: Path) -> Path:
    """Return the wheel that is built from the sdist."""
    must([python, "-c", BUILD, folder])
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    must([python, "-m", "pip", "wheel", *options, "--wheel-dir", folder, *folder.glob("*.tar.gz")])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(python: Path, packages: Sequence[str | Path], folder: Path) -> Path:
    """Return the Python of a new environment that has packages, and finds their dependencies where `.venv` has them."""
    must([python, "-m", "venv", "--without-pip", folder])
    new = folder / python.relative_to(ROOT / ".venv")
    options = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    must([python, "-m", "pip", "--python", new, "install", *options, *packages])
    (dependencies,) = [path for path in (ROOT / ".venv").rglob("site-packages") if path.is_dir()]
    (target,) = folder.rglob("site-packages")
    (target / "dependencies.pth").write_text(f"{dependencies}\n", encoding="utf-8")
    return new


def programs(page: str) -> Iterator[str]:
    """Yield the programs of a page, each after the earlier ones whose names it uses."""
    earlier: list[tuple[set[str], str]] = []
    for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        nodes = list(ast.walk(ast.parse(text)))
        bound = {name for node in nodes for name in names_bound(node)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)} - bound - set(dir(builtins))
        for names, program in reversed(earlier):
            if names & used:
                text = f"{program}\n{text}"
                break
        earlier.append((bound, text))
        yield text


def names_bound(node: ast.AST) -> list[str]:
    """Return the names that a statement or expression gives a meaning to."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def check_types(python: Path, user: Path, folder: Path) -> list[str]:
    """Return the complaints of both checkers about the programs, and what they failed to complain about."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        stem = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for number, program in enumerate(programs(page.read_text(encoding="utf-8"))):
            (folder / f"{stem}_{number}.py").write_text(program, encoding="utf-8")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "canary.py").write_text(CANARY, encoding="utf-8")
    # A scorer that nobody here has installed, and modules that a page tells its reader to write.
    settings = {"typeCheckingMode": "standard", "reportMissingImports": "none"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\n", encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "package"
    commands: list[Sequence[str | Path]] = [
        [python, "-m", "basedpyright", "--pythonpath", user],
        [python, "-m", "mypy", "--config-file", "mypy.ini", "--python-executable", user, "--cache-dir", cache, "."],
    ]
    found = []
    for command in commands:
        say(f"$ {command[2]}, as a user runs it")
        _, report = execute_quietly([str(part) for part in command], folder)
        errors = [line.strip() for line in report.splitlines() if re.search(r"(error:|- error)", line)]
        found += [error for error in errors if "canary.py" not in error]
        for line in (2, 4):
            if not any(f"canary.py:{line}:" in error for error in errors):
                found.append(f"{command[2]} does not see that line {line} of this is wrong:\n{CANARY}")
    return found


def must(command: Sequence[str | Path], folder: Path = ROOT, **variables: str) -> None:
    """Run a command that has to succeed; its output is shown if it does not."""
    words = [str(part) for part in command]
    code, output = execute_quietly(words, folder, **variables)
    if code:
        raise SystemExit(f"{output}\n{' '.join(words)}\nended with exit code {code}.")


def main() -> int:
    """Return 0 if the wheel works and its types hold, 1 if types do not."""
    python = Environment().ensure(TEST_EXTRAS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        wheel = build(python, folder)
        user = install(python, [wheel], folder / "empty")
        work = folder / "work"
        work.mkdir()
        must([python, "-c", MODEL, work / "model"])
        readme = next(programs((ROOT / "README.md").read_text(encoding="utf-8")))
        readme = re.sub(r'(total_steps"?[:=] ?)\d+', r"\g<1>2", readme.replace('"gpt2"', '"model"'))
        (work / "readme.py").write_text(f"{readme}\nassert trainer.progress.step == 2\n", encoding="utf-8")
        say(f"$ the README, the doctor and a new trainer with {wheel.name}")
        program = user.with_name("trlx-like")
        must([user, "-c", f"import trlx_like; assert trlx_like.__file__.startswith({str(folder)!r})"], work, **OFFLINE)
        must([program, "doctor"], work, **OFFLINE)
        must([user, "readme.py"], work, **OFFLINE)
        must([program, "new-trainer", "Small"], work, **OFFLINE)
        must([program, "train", "small_trainer.yml"], work, **OFFLINE)
        must([user, "-m", "pytest", "-q", "test_small_trainer.py"], work, **OFFLINE)
        types = folder / "types"
        types.mkdir()
        complaints = check_types(python, user, types)
    for complaint in complaints:
        say(complaint)
    say(f"{len(complaints)} errors in the programs of the pages and the examples.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
