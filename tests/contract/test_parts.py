"""The parts of a trainer know the run, never the trainer; and no module of the package imports in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.unit.test_layers import PACKAGE, imported, modules

USERS = {"callbacks", "probe", "pushing"}  # a callback gets the trainer
"""Modules whose functions users override, which are given the running trainer."""


def trainer_arguments(tree: ast.Module) -> Iterator[str]:
    """Names of functions that take a trainer: by the argument's name, or by its annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in arguments:
                annotation = ast.unparse(argument.annotation) if argument.annotation else ""
                if argument.arg == "trainer" or "Trainer" in annotation:
                    yield f"{node.name}({argument.arg})"


def test_no_part_takes_a_trainer() -> None:
    found = {
        f"{name}: {function}"
        for name, tree in modules(PACKAGE)
        if name.startswith("trlx_like.trainers.") and name.rpartition(".")[2] not in USERS
        for function in trainer_arguments(tree)
    }
    assert found == set()


def test_a_part_that_takes_a_trainer_is_found() -> None:
    source = "def show(trainer): ...\nclass Part:\n    def __init__(self, of: PPOTrainer) -> None: ..."
    assert list(trainer_arguments(ast.parse(source))) == ["show(trainer)", "__init__(of)"]


def graph(package: Path) -> dict[str, set[str]]:
    """Every module with the modules of the package that it imports, also late and for type checkers only."""
    trees = {name.removesuffix(".__init__"): (name, tree) for name, tree in modules(package)}
    found: dict[str, set[str]] = {}
    for short, (name, tree) in trees.items():
        names = {reached for node in ast.walk(tree) for reached in imported(name, node)}
        modules_of = {reached if reached in trees else reached.rpartition(".")[0] for reached in names}
        found[short] = {module for module in modules_of if module in trees and module != short}
    return found


def test_no_module_imports_in_a_circle() -> None:
    """Packages are left out: a module of a package may import another one by the package's name."""
    edges = {
        name: {other for other in others if not _is_package(other)}
        for name, others in graph(PACKAGE).items()
        if not _is_package(name)
    }
    assert circle(edges) == []


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found() -> None:
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}))) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def _is_package(name: str) -> bool:
    return (PACKAGE.parent / Path(*name.split("."))).is_dir()
