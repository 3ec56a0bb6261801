"""Runs that many contract tests compare with, made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.contract.runs import Whole


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Make a recipe's run to its end, once for all tests with the same options; nobody writes into its folder."""

    @cache
    def made(name: str, *changes: tuple[str, Any]) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("whole")
        trainer = make(name, folder, **dict(changes))
        trainer.learn()
        return trainer, folder

    return lambda name, **changes: made(name, *changes.items())
