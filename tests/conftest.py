"""For all tests: what a test registers is gone after it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trlx_like.config import METHODS, TRAINERS


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """A plugin that one test loads must not be a method or trainer in another."""
    modules = set(sys.modules)
    kept = [(registry, dict(registry._entries), dict(registry._aliases)) for registry in (METHODS, TRAINERS)]
    yield
    for registry, entries, aliases in kept:
        registry._entries, registry._aliases = entries, aliases
    for name in set(sys.modules) - modules:
        if re.search(r"_[0-9a-f]{12}$", name):  # a file that `import_file` ran: it has to register again
            del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, as one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path
