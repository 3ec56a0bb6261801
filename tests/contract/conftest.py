"""Runs that many contract tests compare with, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import checks
from trlx_like.testing import TrainerChecks

Checked = Callable[..., TrainerChecks]
"""The fixture `checked`: called with a recipe's name and options, it returns its checks, the same at each call."""
Whole = Callable[..., tuple[Any, Path]]
"""The fixture `whole`: called with a recipe's name and options, it returns the run's trainer and folder."""


@pytest.fixture(scope="session")
def checked() -> Checked:
    made = cache(lambda name, *changes: checks(name, **dict(changes)))
    return lambda name, **changes: made(name, *changes.items())


@pytest.fixture(scope="session")
def whole(checked: Checked) -> Whole:
    """Make a recipe's run to its end, once for all tests with the same options; nobody writes into its folder."""

    def run(name: str, **changes: Any) -> tuple[Any, Path]:
        found = checked(name, **changes)
        return found.whole, found.folder / "whole"

    return run
