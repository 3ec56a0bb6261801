"""Batches for the reward runner, and what it leaves on record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trlx_like.rewards.runner import FAULTS_FILE, RewardRunner, Scores

GIVEN = {"samples": ["pa", "pbad", "pccc"], "prompts": ["p"] * 3, "outputs": ["a", "bad", "ccc"]}
RIGHT = [1.0, 3.0, 3.0]
MANY = {name: column * 2 for name, column in GIVEN.items()}

Runners = Callable[..., RewardRunner]


def scores_of(runner: RewardRunner, given: Mapping[str, Any] = GIVEN, **more: Any) -> Scores:
    return score(runner, given, [{} for _ in given["outputs"]], **more)


def score(runner: RewardRunner, given: Mapping[str, Any], metadata: Sequence[Mapping[str, Any]], **more: Any) -> Scores:
    return runner.result(runner.submit(given, metadata, **more))


def faults(folder: Path) -> list[dict[str, Any]]:
    file = folder / FAULTS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
