"""What only `trlx_like/distributed` may do: name the libraries that divide weights, and write into weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "trlx_like"

NAMES = re.compile(r"fsdp|deepspeed|dtensor|fully_shard|\bds_", re.IGNORECASE)
"""What a file outside of `distributed` may not have in its code. Options and their descriptions are in `config`."""
WRITES = re.compile(r"(_foreach)?_?(copy|lerp|add|mul|sub|div|fill|addcmul|zero|normal|uniform)_")
"""Methods of tensors that write into them, and functions of torch on lists of tensors."""

OWN = {
    "functional/counter.py": "random numbers that are being made",
    "imagined.py": "weights without memory, to estimate a run",
    "functional/logprobs.py": "probabilities, of which an entropy is made",
    "models/adapters.py": "the number format of a new adapter",
    "models/diffusion.py": "number formats, before the model is divided",
    "models/faster.py": "what GELU has just made",
    "models/heads.py": "a head that is being made",
    "samplers/cache.py": "keys and values, in memory of the cache",
    "samplers/recorded.py": "the same, of a step that is replayed",
    "samplers/plain_copy.py": "the engine's own copy of the weights",
    "trainers/ddpo.py": "advantages of samples",
    "trainers/guard.py": "the parts that the optimizer updates, to undo a step",
}
"""Where a tensor may be written to, and what it is."""


TRANSLATES = "compat/"
"""Options of other libraries by our own names."""


def outside() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(("distributed/", "config/")):
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def words(tree: ast.Module) -> Iterator[str]:
    """Names, attributes and imports; texts and comments are free to explain."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield name


@pytest.fixture(scope="module")
def files() -> list[tuple[str, ast.Module]]:
    return list(outside())


def test_nothing_else_names_a_library_that_divides_weights(files: list[tuple[str, ast.Module]]) -> None:
    found = [(file, word) for file, tree in files for word in words(tree) if NAMES.search(word)]
    found = [(file, word) for file, word in found if not file.startswith(TRANSLATES)]
    assert found == []


def written(tree: ast.Module) -> Iterator[str]:
    """Calls of methods that write into a tensor, and assignments to `.data`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if WRITES.fullmatch(name):
                yield name
            case ast.Assign(targets=[ast.Attribute(attr="data")]) if not _is_self(node.targets[0]):
                yield ".data ="


def _is_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def test_nothing_else_writes_into_a_weight(files: list[tuple[str, ast.Module]]) -> None:
    assert {file for file, tree in files if list(written(tree))} == set(OWN)
