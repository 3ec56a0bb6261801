"""What may import what: the package as layers, read from the source of every module.

Imports inside functions and under `TYPE_CHECKING` count for our own parts: a late import does not change who
depends on whom. For other people's packages only imports that run with the module count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from trlx_like.algorithms import ALGORITHMS

PACKAGE = Path(__file__).resolve().parents[2] / "trlx_like"

GROUND = {"algorithms", "errors", "imports", "meeting", "reading", "redact", "registry", "rendering"}
PARTS = GROUND | {"config", "functional", "data"}
SERVICES = {"models", "pipelines", "rewards", "tracking", "distributed", "optim", "checkpoint"}
TRAINING = PARTS | SERVICES | {"samplers", "sharing"}
EVERYTHING = TRAINING | {"trainers", "api", "cli", "presets"}

# part -> the parts it may import. A part is a file or folder directly under trlx_like.
MAY_IMPORT: dict[str, set[str]] = {
    "algorithms": set(),
    "redact": set(),
    "errors": {"redact"},
    "imports": {"errors"},
    "meeting": set(),
    "reading": set(),
    "rendering": set(),
    "registry": {"errors", "imports"},
    "config": GROUND,
    "functional": set(),
    "data": GROUND,
    **dict.fromkeys(SERVICES, PARTS),
    "rewards": PARTS | {"models", "pipelines"},  # reward models
    "samplers": PARTS | SERVICES,
    "sharing": PARTS | SERVICES,
    "trainers": TRAINING,
    "presets": EVERYTHING - {"api", "cli", "presets"},
    "api": EVERYTHING - {"api", "cli"},
    "__init__": EVERYTHING - {"cli"},
    "continuation": EVERYTHING - {"cli"},
    "check": EVERYTHING - {"cli"},
    "deep_check": EVERYTHING - {"cli"} | {"check"},
    "imagined": set(),
    "rehearsal": EVERYTHING - {"cli"} | {"check"},
    "estimate": EVERYTHING - {"cli"} | {"check", "imagined", "rehearsal"},
    "savings": EVERYTHING - {"cli"} | {"estimate"},
    "cluster": EVERYTHING - {"cli"} | {"estimate", "savings"},
    "doctor": GROUND | {"__init__", "models", "samplers"},
    "new_trainer": {"config", "errors", "rendering"},
    "records": {"checkpoint", "errors", "tracking"},
    "reproduce": EVERYTHING - {"cli"},
    "reward_check": EVERYTHING - {"cli"} | {"check"},
    "command_group": GROUND,
    "compat": EVERYTHING - {"cli"},
    "testing": EVERYTHING - {"cli"},
    "sweep": EVERYTHING - {"cli"} | {"cluster", "compat"},
    "cli": EVERYTHING - {"cli"}
    | {"check", "cluster", "command_group", "compat", "continuation", "deep_check", "doctor", "records", "reproduce"}
    | {"__init__", "new_trainer", "reward_check", "sweep"},
    "__main__": {"cli"},
}

# part -> the packages of others that it may import when it is itself imported. No entry: any but OPTIONAL.
OTHERS: dict[str, set[str]] = {
    "algorithms": set(),
    "errors": set(),
    "redact": set(),
    "imports": set(),
    "meeting": set(),
    "reading": set(),
    "rendering": set(),
    "registry": set(),
    "config": {"annotated_types", "pydantic", "pydantic_core", "yaml"},
    "functional": {"torch"},
    "data": {"numpy", "torch"},
    "__init__": set(),
}
OPTIONAL = {
    *("bitsandbytes", "datasets", "deepspeed", "diffusers", "mlflow", "optuna", "pandas", "peft", "PIL", "pyarrow"),
    *("sklearn", "swanlab", "tensorboard", "trackio", "vaderSentiment", "vllm", "wandb"),
}

LONGEST = 350  # lines of a file

# A file `trainers/ppo.py`, `trainers/ppo_*.py` or folder `trainers/ppo` belongs to the algorithm ppo; all
# others are shared. Shared files know no algorithm; an algorithm may know one other, its parent.
NAMES = {row.name for row in ALGORITHMS}


def modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    """Dotted name (`trlx_like.trainers.ppo`, packages with `.__init__`) and syntax tree of every module."""
    for file in sorted(package.rglob("*.py")):
        name = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        yield name, ast.parse(file.read_text(encoding="utf-8"))


def imported(module: str, node: ast.AST) -> list[str]:
    """Dotted names that an import statement reaches for: `from a import b` is `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = module.split(".")[: -node.level] if node.level else []
        return [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return []


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not guarded and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_module_level(child)


def part_of(name: str, package: Path) -> str | None:
    """The part a dotted name lies in; `__init__` for the package's own names, None for others' packages."""
    top, _, rest = name.partition(".")
    if top != package.name:
        return None
    part = rest.partition(".")[0]
    exists = (package / part).is_dir() or (package / f"{part}.py").is_file()
    return part if part and exists else "__init__"


def algorithm_of(name: str) -> str | None:
    """The algorithm that a dotted name under `trainers` belongs to, None for shared ones."""
    _, _, rest = name.partition(".trainers.")
    stem = rest.partition(".")[0]
    found = [known for known in NAMES if stem == known or stem.startswith(f"{known}_")]
    return max(found, key=len, default=None)


def wrong_parts(package: Path) -> list[str]:
    """Imports among our own parts that point up or sideways."""
    wrong = []
    for module, tree in modules(package):
        part = part_of(module, package) or ""
        if part not in MAY_IMPORT:
            wrong.append(f"{module} is in no layer: add {part} to MAY_IMPORT")
            continue
        for node in ast.walk(tree):
            for name in imported(module, node):
                other = part_of(name, package)
                if other not in (None, part) and other not in MAY_IMPORT[part]:
                    wrong.append(f"{module} imports {name}")
    return wrong


def wrong_others(package: Path) -> list[str]:
    """Imports of other people's packages that run too early."""
    wrong = []
    for module, tree in modules(package):
        part = part_of(module, package) or ""
        for node in at_module_level(tree):
            for name in imported(module, node):
                top = name.partition(".")[0]
                if top in sys.stdlib_module_names or top == package.name:
                    continue
                if top in OPTIONAL or (part in OTHERS and top not in OTHERS[part]):
                    wrong.append(f"{module} imports {name}")
    return wrong


def wrong_algorithms(package: Path) -> list[str]:
    """Trainer files that know algorithms they should not."""
    wrong = []
    for module, tree in modules(package):
        if part_of(module, package) != "trainers":
            continue
        own = algorithm_of(module)
        names = {name for node in ast.walk(tree) for name in imported(module, node)}
        known = {algorithm_of(name) for name in names if part_of(name, package) == "trainers"} - {None, own}
        if len(known) > (0 if own is None else 1):
            wrong.append(f"{module} imports {', '.join(sorted(filter(None, known)))}")
    return wrong


def test_parts_import_downwards_only() -> None:
    assert wrong_parts(PACKAGE) == []


def test_heavy_and_optional_packages_are_imported_late() -> None:
    assert wrong_others(PACKAGE) == []


def test_algorithms_know_the_shared_files_and_at_most_one_parent() -> None:
    assert wrong_algorithms(PACKAGE) == []


def test_a_file_holds_one_idea() -> None:
    lines = {file.relative_to(PACKAGE): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    assert {file: count for file, count in lines.items() if count > LONGEST} == {}


def test_the_table_has_no_cycle() -> None:
    assert set(TopologicalSorter(MAY_IMPORT).static_order()) == set(MAY_IMPORT)


def test_contributing_shows_the_same_table() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (`.*`) \| (.*) \|$", text, re.MULTILINE)
    layers = [(int(layer), set(re.findall(r"`(\w+)`", parts)), allowed) for layer, parts, allowed in rows]
    shown: dict[str, set[str]] = {}
    for _, parts, allowed in layers:
        named = set(re.findall(r"`(\w+)`", allowed))
        whole = [
            range(int(low), int(high or low) + 1) for low, high in re.findall(r"layers? (\d)(?: to (\d))?", allowed)
        ]
        below = {part for layer, others, _ in layers for numbers in whole if layer in numbers for part in others}
        shown |= dict.fromkeys(parts, named | below)
    assert shown == MAY_IMPORT


def test_every_part_of_the_table_exists() -> None:
    missing = [part for part in MAY_IMPORT if part_of(f"trlx_like.{part}", PACKAGE) != part]
    assert missing == []


def test_every_folder_is_a_package() -> None:
    # Without it coverage and type checks pass the folder over without a word.
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_wrong_imports_are_found(tmp_path: Path) -> None:
    package = tmp_path / "toy"
    sources = {
        "errors.py": "",
        "api.py": "import toy.trainers.ppo",
        "config/__init__.py": "from .. import errors\nif True:\n    import torch.nn\n",
        "functional/kl.py": "def late():\n    from ..errors import TrlxError",
        "models/heads.py": "import typing\nif typing.TYPE_CHECKING:\n    from toy.trainers import ppo",
        "tracking/board.py": "import wandb\ndef late():\n    import tensorboard",
        "trainers/base.py": "from toy.trainers.ppo import PPOTrainer",
        "trainers/online_dpo.py": "from . import base, online_dpo_loss\nfrom .dpo import DPOTrainer",
        "trainers/ppo.py": "from . import base, dpo, sft",
        "helpers.py": "",
    }
    for name, source in sources.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    assert wrong_parts(package) == [
        "toy.functional.kl imports toy.errors.TrlxError",
        "toy.helpers is in no layer: add helpers to MAY_IMPORT",
        "toy.models.heads imports toy.trainers.ppo",
    ]
    assert wrong_others(package) == [
        "toy.config.__init__ imports torch.nn",
        "toy.tracking.board imports wandb",
    ]
    assert wrong_algorithms(package) == [
        "toy.trainers.base imports ppo",
        "toy.trainers.ppo imports dpo, sft",
    ]


@pytest.mark.parametrize("module", ["trlx_like", "trlx_like.registry", "trlx_like.config", "trlx_like.cli"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    heavy = {"torch", "transformers", "accelerate", "numpy", *OPTIONAL}
    program = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
