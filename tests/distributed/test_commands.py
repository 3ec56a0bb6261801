"""The three ways to start two processes really start two that know of each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.contract.recipes import GENERATION, PROMPTS
from tests.contract.runs import rows
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
CPU2 = str(ROOT / "configs" / "accelerate" / "cpu2.yaml")
REWARD = "def reward(outputs):\n    return [output.count('a') - 0.1 * len(output) for output in outputs]\n"


COMMANDS = {
    "trlx-like": ["-m", "trlx_like", "train", "config.yml", "--num-processes", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trlx_like", "train", "config.yml"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--config_file", CPU2, "-m", "trlx_like", "train", "config.yml"),
    ],
}


@pytest.mark.parametrize(
    "command",
    [
        COMMANDS["trlx-like"],
        # The same path through the trainer, and ten seconds of processor time for each start.
        pytest.param(COMMANDS["torchrun"], marks=pytest.mark.slow),
        pytest.param(COMMANDS["accelerate"], marks=pytest.mark.slow),
    ],
    ids=list(COMMANDS),
)
def test_two_processes_train_together(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "method": {"name": "PPOConfig", "num_rollouts": 3, "chunk_size": 2, "gen_kwargs": GENERATION},
        "train": {"trainer": "PPOTrainer", "seq_length": 20, "batch_size": 2, "total_steps": 3, "epochs": 100},
        "data": {"prompts": PROMPTS, "reward_fn": "reward.py:reward"},
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "process" in line]
    assert said == ["PPOTrainer: 2 processes on cpu, at most 3 steps of 2 samples."], run.stderr
    assert [row["step"] for row in rows(tmp_path / "ckpts")] == [0, 1, 2, 3]
    state = tmp_path / "ckpts" / "checkpoint_3" / "state"
    stores = [(state / f"rank_{rank}" / "store.json").read_text() for rank in range(2)]
    assert '"count": 2' in stores[0] and '"count": 1' in stores[1]
