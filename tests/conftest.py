"""For all tests: what a test registers is gone after it."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trlx_like.config import METHODS, TRAINERS
from trlx_like.registry import Registry

REGISTRIES: tuple[Registry[Any], ...] = (METHODS, TRAINERS)
PLUGINS: list[tuple[Registry[Any], str, Any, ModuleType]] = []
"""What test files registered when they were imported, by importing a plugin, with the plugin's module."""


Before = tuple[list[set[str]], set[str]]


def registered() -> Before:
    """The names in the registries, and the modules."""
    return [set(registry._entries) for registry in REGISTRIES], set(sys.modules)


def take_back(before: Before) -> list[tuple[Registry[Any], str, Any, ModuleType]]:
    """Remove what has been registered since, and the modules that did it: who imports them again registers again."""
    found = [
        (registry, name, entry, sys.modules[entry.source.partition(":")[0]])
        for registry, names in zip(REGISTRIES, before[0], strict=True)
        for name, entry in registry._entries.items()
        if name not in names
    ]
    for registry, name, _, module in found:
        del registry._entries[name]
        sys.modules.pop(module.__name__, None)
    for name in set(sys.modules) - before[1]:
        if re.search(r"_[0-9a-f]{12}$", name):  # a file that `import_file` ran
            del sys.modules[name]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Take back what importing a test file has registered: it is there for its own tests only."""
    before = registered()
    report = yield
    PLUGINS.extend(take_back(before))
    return report


@pytest.fixture(autouse=True, scope="module")
def plugins_of_the_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Register what a test file has imported from plugins, for its own tests."""
    known = {getattr(value, "__module__", None) for value in vars(request.module).values()}
    own = [plugin for plugin in PLUGINS if plugin[3].__name__ in known]
    for registry, name, entry, module in own:
        registry._entries[name], sys.modules[module.__name__] = entry, module
    yield
    for registry, name, _, module in own:
        registry._entries.pop(name, None)
        sys.modules.pop(module.__name__, None)


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """A plugin that one test loads must not be a method or trainer in another."""
    before, aliases = registered(), [dict(registry._aliases) for registry in REGISTRIES]
    yield
    take_back(before)
    for registry, names in zip(REGISTRIES, aliases, strict=True):
        registry._aliases = names


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, as one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path
