"""PPO finds shortest paths: a GPT-2 first imitates random walks, then is rewarded for short ones.

    python examples/randomwalks/ppo.py [--seed 1000] [--directory runs/randomwalks]

The configurations are configs/sft_randomwalks.yml and configs/ppo_randomwalks.yml. With `--seeds 5` it trains
five times and prints a table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples import configurations
from examples.randomwalks.seeds import WALKS, Result, Stopwatch, main, measured
from examples.randomwalks.start import train_start
from examples.randomwalks.task import default_task, metric_fn, reward_fn


def run(seed: int, directory: Path) -> Result:
    """Train the start model and PPO under one seed (the graph stays the same)."""
    watch = Stopwatch()
    model = directory / "start" / "hf_model"
    train_start(directory / "start", seed=seed).save_pretrained(model)
    seconds = {"start": watch.lap()}
    train_ppo(model, directory / "ppo", seed)
    return Result(directory / "ppo", measured(directory / "ppo"), {**seconds, "PPO": watch.lap()})


def train_ppo(
    model: Path, directory: Path, seed: int, steps: int = 100, batch_size: int | None = None, **method: Any
) -> None:
    """Train PPO from the model in a folder. method: options of PPO to change."""
    task = default_task()
    config = configurations.load("ppo_randomwalks")
    config = config.evolve(
        model={"model_path": str(model)},
        method=method,
        scheduler={"kwargs": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": steps}},
        train={
            "seed": seed,
            "checkpoint_dir": str(directory),
            "resume_from_checkpoint": None,
            "total_steps": steps,
            "batch_size": batch_size or config.train.batch_size,
        },
    )
    trlx_like.train(config, reward_fn, task.prompts, eval_prompts=task.eval_prompts * WALKS, metric_fn=metric_fn)


if __name__ == "__main__":
    main(__doc__, run)
