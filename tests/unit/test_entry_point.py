"""The installed program, which Python starts without the current folder on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_files_that_a_yaml_names_find_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORTH = 1.0\n")
    (tmp_path / "rewards.py").write_text(
        "from neighbour import WORTH\n\n\ndef reward_fn(outputs):\n    return [WORTH]\n"
    )
    config = {
        "model": {"model_path": "gpt2"},
        "data": {"prompts": ["a"], "reward_fn": "rewards.py:reward_fn"},
        "method": {"name": "PPOConfig"},
        "train": {"trainer": "PPOTrainer", "total_steps": 1, "epochs": 1, "seq_length": 64, "batch_size": 1},
    }
    (tmp_path / "ppo.yml").write_text(yaml.safe_dump(config))
    code = f"import sys; sys.path.append({str(ROOT)!r}); from trlx_like.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-c", code, "check", "ppo.yml"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
