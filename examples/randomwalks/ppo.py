"""PPO finds shortest paths: a GPT-2 first imitates random walks, then is rewarded for short ones.

    python examples/randomwalks/ppo.py [ppo | grpo | rloo | rft | online_dpo] [--seed 1000]

The other trainers learn from the same start, on the same task. The configurations are configs/sft_randomwalks.yml and
configs/ppo_randomwalks.yml and so on. With `--seeds 10` it trains on ten graphs, with `--seeds 5 --problem 44` five
times on one. It prints a table.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples import configurations
from examples.problems import Draw
from examples.randomwalks.seeds import WALKS, Result, Run, Stopwatch, main, measured
from examples.randomwalks.start import train_start
from examples.randomwalks.task import RandomWalks

METHODS = ("ppo", "grpo", "rloo", "rft", "online_dpo")


def run(method: str, draw: Draw) -> Result:
    """Train the start model, and then by one of `METHODS`, on one graph."""
    watch = Stopwatch()
    task, directory = RandomWalks(draw.problem), draw.directory
    model = directory / "start" / "hf_model"
    train_start(directory / "start", task=task, seed=draw.seed).save_pretrained(model)
    seconds = {"start": watch.lap()}
    tune(method, task, model, directory / method, draw.seed)
    return Result(directory / method, measured(directory / method), {**seconds, method: watch.lap()})


def tune(
    method: str,
    task: RandomWalks,
    model: Path,
    directory: Path,
    seed: int,
    steps: int | None = None,
    *,
    reference: Path | None = None,
    **options: Any,
) -> Any:
    """Train from the model in a folder, and return the trainer.

    Args:
        method: One of `METHODS`, or another that has a configuration for this task.
        task: The graph.
        model: The folder of the start model.
        directory: The run folder.
        seed: Of everything random in training.
        steps: Optimizer steps; None for those of the configuration.
        reference: The folder of the reference, such as a teacher; None for the start model.
        options: Options of the method to change, and `batch_size`.
    """
    config = configurations.load(f"{method}_randomwalks")
    steps = steps or config.train.total_steps
    train: dict[str, Any] = {"seed": seed, "checkpoint_dir": str(directory), "total_steps": steps}
    train["batch_size"] = options.pop("batch_size", config.train.batch_size)
    config = config.evolve(
        model={"model_path": str(model), "ref_model_path": None if reference is None else str(reference)},
        method=options,
        train={**train, "resume_from_checkpoint": None},
    )
    if config.scheduler.name == "linear":
        config = config.evolve(scheduler={"kwargs": {**config.scheduler.kwargs, "total_iters": steps}})
    return trlx_like.train(
        config, task.reward_fn, task.prompts, eval_prompts=task.eval_prompts * WALKS, metric_fn=task.metric_fn
    )


if __name__ == "__main__":
    runs: dict[str, Run] = {method: partial(run, method) for method in METHODS}
    main(__doc__, runs, Path("runs/randomwalks"))
