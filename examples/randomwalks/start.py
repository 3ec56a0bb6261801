"""Train the model that PPO starts from: a GPT-2 from random weights that learns to imitate random walks.

    python examples/randomwalks/start.py [--seed 1000] [--directory runs/randomwalks/starts]

With `--seeds 10` it trains on ten graphs, each in its own folder, and prints optimality and CPU seconds.
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
from examples.problems import add_options, draws, summary
from examples.randomwalks.seeds import WALKS, Stopwatch
from examples.randomwalks.task import RandomWalks, default_task

DIRECTORY = Path("runs/randomwalks/start")


def train_start(
    directory: Path = DIRECTORY,
    samples: Sequence[Any] | None = None,
    model: Path | None = None,
    task: RandomWalks | None = None,
    **train: Any,
) -> Any:
    """Train a model to imitate walks, and return the trainer.

    samples: the walks to imitate; by default random walks. model: a folder to start from instead of random weights.
    task: the graph; by default that of the YAML files. train: options of the section `train` to change.
    """
    config = configurations.load("sft_randomwalks").evolve(train={"checkpoint_dir": str(directory), **train})
    if model is not None:
        config = config.evolve(model={"model_path": str(model)})
    task = task or default_task()
    walks = task.samples if samples is None else samples
    return trlx_like.train(config, samples=walks, eval_prompts=task.eval_prompts * WALKS, metric_fn=task.metric_fn)


def start() -> str:
    """Return the folder of the trained model, which the first call trains. YAML files name it as `model.model_path`."""
    model = DIRECTORY / "hf_model"
    if not (model / "model.safetensors").exists():
        train_start().save_pretrained(model)
    return str(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1000, Path("runs/randomwalks/starts"), "graph")
    runs, reached = draws(parser.parse_args()), []
    for draw in runs:
        watch = Stopwatch()
        trainer = train_start(draw.directory, task=RandomWalks(draw.problem), seed=draw.seed)
        trainer.save_pretrained(draw.directory / "hf_model")
        reached.append(trainer.last_metrics["metrics/optimality"])
        print(f"graph {draw.problem}  seed {draw.seed}  optimality {reached[-1]:.2f}  CPU seconds {watch.lap():.0f}")
    print(summary(runs, reached))
