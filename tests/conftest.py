"""For all tests: what a test registers, and the level of logging that it sets, is gone after it."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trlx_like.config import METHODS, TRAINERS
from trlx_like.registry import Registry

# Many tests compare with tensors of their own, on the CPU. `benchmarks.gpu` checks whole runs on a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, also to processes that they start

REGISTRIES: tuple[Registry[Any], ...] = (METHODS, TRAINERS)
PLUGINS: list[tuple[Registry[Any], str, Any, ModuleType | None]] = []
"""What test files registered when they were imported, by importing a plugin, with the plugin's module."""


Before = tuple[list[set[str]], set[str]]


def registered() -> Before:
    """The names in the registries, and the modules."""
    return [set(registry._entries) for registry in REGISTRIES], set(sys.modules)


def take_back(before: Before) -> list[tuple[Registry[Any], str, Any, str]]:
    """Remove what has been registered since, and the modules that did it: who imports them again registers again."""
    found = [
        (registry, name, entry, entry.source.partition(":")[0])
        for registry, names in zip(REGISTRIES, before[0], strict=True)
        for name, entry in registry._entries.items()
        if name not in names
    ]
    for registry, name, _, _ in found:
        del registry._entries[name]
    plugins = {module for *_, module in found if not module.startswith("tests.")}
    for name in set(sys.modules) - before[1]:
        if name in plugins or re.search(r"_[0-9a-f]{12}$", name):  # a file that `import_file` ran
            del sys.modules[name]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Take back what importing a test file has registered: it is there for its own tests only."""
    before = registered()
    report = yield
    modules = dict(sys.modules)
    PLUGINS.extend((*plugin, modules.get(module)) for *plugin, module in take_back(before))
    return report


@pytest.fixture(autouse=True, scope="module")
def plugins_of_the_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Register what a test file has imported from plugins, for its own tests."""
    known = {getattr(value, "__module__", None) for value in vars(request.module).values()}
    own = [plugin for plugin in PLUGINS if plugin[2].source.partition(":")[0] in known]
    before = registered()
    for registry, name, entry, module in own:
        registry._entries[name] = entry
        if module is not None:
            sys.modules[module.__name__] = module
    yield
    take_back(before)


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """A plugin that one test loads must not be a method or trainer in another, nor what it logs be hidden there."""
    before, aliases = registered(), [dict(registry._aliases) for registry in REGISTRIES]
    logger = logging.getLogger("trlx_like")
    level = logger.level
    yield
    logger.setLevel(level)
    take_back(before)
    for registry, names in zip(REGISTRIES, aliases, strict=True):
        registry._aliases = names


@pytest.fixture
def number_format() -> Iterator[None]:
    """Let a test choose `backend.mixed_precision`: accelerate remembers the first one of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, as one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path
