from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli_support import ppo_file, run


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a PPO run of eight steps with an adapter, whose best checkpoint is not the last one."""
    folder = tmp_path_factory.mktemp("tuned")
    options = ["model.peft_config={peft_type: LORA, r: 2}", "train.total_steps=8", "optimizer.kwargs.lr=0.02"]
    result = run("train", ppo_file(folder), *[word for option in options for word in ("--set", option)])
    assert result.exit_code == 0, result.output
    return folder / "run"
