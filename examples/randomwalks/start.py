"""Train the model that PPO starts from: a GPT-2 from random weights that learns to imitate random walks.

    python examples/randomwalks/start.py [--directory runs/randomwalks/start]

With `--seeds 5` it trains five times, each in its own folder, and prints the optimality and CPU seconds of each run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples import configurations
from examples.randomwalks.seeds import WALKS, Stopwatch
from examples.randomwalks.task import default_task, metric_fn

DIRECTORY = Path("runs/randomwalks/start")


def train_start(
    directory: Path = DIRECTORY, samples: Sequence[Any] | None = None, model: Path | None = None, **train: Any
) -> Any:
    """Train a model to imitate walks, and return the trainer.

    samples: the walks to imitate; by default random walks. model: a folder to start from instead of random weights.
    train: options of the section `train` to change.
    """
    config = configurations.load("sft_randomwalks").evolve(train={"checkpoint_dir": str(directory), **train})
    if model is not None:
        config = config.evolve(model={"model_path": str(model)})
    task = default_task()
    walks = task.samples if samples is None else samples
    return trlx_like.train(config, samples=walks, eval_prompts=task.eval_prompts * WALKS, metric_fn=metric_fn)


def start() -> str:
    """Return the folder of the trained model, which the first call trains. YAML files name it as `model.model_path`."""
    model = DIRECTORY / "hf_model"
    if not (model / "model.safetensors").exists():
        train_start().save_pretrained(model)
    return str(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"run folder (default {DIRECTORY})")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, with seeds from 1000 up (default 1)")
    arguments = parser.parse_args()
    for seed in range(1000, 1000 + arguments.seeds):
        folder = arguments.directory / f"seed{seed}" if arguments.seeds > 1 else arguments.directory
        watch = Stopwatch()
        trainer = train_start(folder, seed=seed)
        trainer.save_pretrained(folder / "hf_model")  # where `start` looks for it
        optimality = trainer.last_metrics["metrics/optimality"]
        print(f"seed {seed}  optimality {optimality:.2f}  CPU seconds {watch.lap():.0f}", flush=True)
