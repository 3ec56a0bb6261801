"""Runners and servers that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rewards.support import Runners, Server
from trlx_like.config import RewardFnConfig
from trlx_like.rewards.runner import RewardRunner


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runners]:
    """Makes runners with options of the section `reward`; ends their workers."""
    made: list[RewardRunner] = []

    def make(function: Any, **options: Any) -> RewardRunner:
        made.append(RewardRunner(function, RewardFnConfig(**options), directory=tmp_path, rank=3))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()
