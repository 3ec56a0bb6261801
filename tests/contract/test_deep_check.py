"""`check --deep` for every registered trainer: one round and one step are measured, and the run folder is as it was."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.contract.recipes import RECIPES, ingredients
from trlx_like.config import TRAINERS
from trlx_like.deep_check import deep_check


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of the last change of every file, and the folders."""
    return {
        str(file.relative_to(folder)): (
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            file.stat().st_mtime_ns,
        )
        for file in sorted(folder.rglob("*"))
    }


def test_every_trainer_has_a_recipe() -> None:
    assert set(RECIPES) == set(TRAINERS.names())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_first_step_is_measured_and_the_run_folder_is_not_touched(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint_1").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "checkpoint_1" / "manifest.json").write_text("{}")
    before = digest(tmp_path)
    config, arguments = ingredients(name, run)
    lines = deep_check(config, **arguments)
    assert digest(tmp_path) == before
    said = {line.partition(":")[0]: line for line in lines}
    assert {"model", "time", "memory", "plan", "disk"} <= set(said)
    assert "all finite" in said["model"]
    assert ("causal" in said["model"]) == (config.model.model_arch_type == "causal")
    assert "step " in said["time"] and "checkpoint " in said["time"]
    assert ("reward" in said) == (arguments.get("reward_fn") is not None)
    assert "steps" in said["plan"]
