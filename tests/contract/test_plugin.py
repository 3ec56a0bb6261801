"""The promise to other people's code: a trainer in one short file, named in a YAML, trains and learns."""

from __future__ import annotations

from pathlib import Path

import yaml

import trlx_like
from tests.tiny import save_tiny

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin_reinforce.py"


def share_of_a(outputs: list[str]) -> list[float]:
    return [output.count("a") / 8 for output in outputs]


def test_a_plugin_of_one_file_trains_by_yaml_and_learns(tmp_path: Path) -> None:
    config = {
        "plugins": [str(PLUGIN)],
        "model": {"model_path": save_tiny(tmp_path / "model")},
        "optimizer": {"name": "adamw", "kwargs": {"lr": 0.01}},
        "method": {"name": "ReinforceConfig", "num_rollouts": 32, "gen_kwargs": {"max_new_tokens": 8}},
        "train": {
            "trainer": "ReinforceTrainer",
            "total_steps": 40,
            "epochs": 40,
            "seq_length": 16,
            "batch_size": 32,
            "eval_interval": 40,
            "checkpoint_dir": str(tmp_path / "run"),
        },
    }
    (tmp_path / "reinforce.yml").write_text(yaml.safe_dump(config))
    trainer = trlx_like.train(tmp_path / "reinforce.yml", share_of_a, ["b", "c", "d", "e"] * 8)
    assert trainer.last_metrics["reward/mean"] > 0.6  # .03 by chance
    assert (tmp_path / "run" / "checkpoint_40" / "hf_model" / "model.safetensors").is_file()


def test_the_plugin_is_short_and_uses_public_names_only() -> None:
    text = PLUGIN.read_text()
    assert len(text.splitlines()) < 60
    assert "._" not in text
