"""Where PPO starts: a GPT-2 from random weights that has learned to imitate random walks.

python examples/randomwalks/start.py [--directory runs/randomwalks/start]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples.randomwalks.task import default_task, metric_fn

CONFIG = Path(__file__).parents[2] / "configs" / "sft_randomwalks.yml"
DIRECTORY = Path("runs/randomwalks/start")


def train_start(
    directory: Path = DIRECTORY, samples: Sequence[Any] | None = None, model: Path | None = None, **train: Any
) -> Any:
    """Trains the start and returns the trainer.

    samples: what it imitates; by default random walks. model: a folder to start from in place of random weights.
    train: options of the section `train` to change.
    """
    config = trlx_like.TRLConfig.load_yaml(CONFIG).evolve(train={"checkpoint_dir": str(directory), **train})
    if model is not None:
        config = config.evolve(model={"model_path": str(model)})
    task = default_task()
    walks = task.samples if samples is None else samples
    return trlx_like.train(config, samples=walks, eval_prompts=task.eval_prompts, metric_fn=metric_fn)


def start() -> str:
    """The folder of the trained start, made at the first call. A YAML names it as its `model.model_path`."""
    model = DIRECTORY / "hf_model"
    if not (model / "model.safetensors").exists():
        train_start().save_pretrained(model)
    return str(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"run folder (default {DIRECTORY})")
    folder = parser.parse_args().directory
    trainer = train_start(folder)
    trainer.save_pretrained(folder / "hf_model")  # where `start` looks for it
    print(f"optimality {trainer.last_metrics['metrics/optimality']:.2f}")
