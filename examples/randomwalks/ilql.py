"""ILQL finds shortest paths from random walks and their rewards alone, from random weights and without sampling.

    python examples/randomwalks/ilql.py [--seed 1000] [--directory runs/randomwalks/ilql]

The configuration is configs/ilql_randomwalks.yml; the table shows decoding with beta 100. With `--seeds 10` it
trains on ten graphs, with `--seeds 5 --problem 44` five times on one. `ilql_300` makes 300 steps in place of 150, with
tau .95 in place of .8: on some graphs .8 converges to a longer way, and .95 takes longer to learn.
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
from examples.randomwalks.seeds import WALKS, Result, Stopwatch, main, measured
from examples.randomwalks.task import RandomWalks

BETA = 100


def run(draw: Draw, steps: int = 150, **method: Any) -> Result:
    """Train ILQL from random weights on one graph. method: options of ILQL to change."""
    watch = Stopwatch()
    train_ilql(RandomWalks(draw.problem), draw.directory, draw.seed, steps, **method)
    return Result(draw.directory, measured(draw.directory), {"ILQL": watch.lap()})


def train_ilql(task: RandomWalks, directory: Path, seed: int, steps: int = 150, **method: Any) -> Any:
    """Train ILQL with evaluations at one beta, and return the trainer. method: options of ILQL to change."""
    config = configurations.load("ilql_randomwalks").evolve(
        method={"gen_kwargs": {"max_new_tokens": 10, "top_k": 10, "beta": BETA}, **method},
        scheduler={"kwargs": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": steps}},
        train={
            "seed": seed,
            "checkpoint_dir": str(directory),
            "resume_from_checkpoint": None,
            "total_steps": steps,
        },
    )
    return trlx_like.train(
        config,
        samples=task.samples,
        rewards=task.optimality(task.samples),
        eval_prompts=task.eval_prompts * WALKS,
        metric_fn=task.metric_fn,
    )


if __name__ == "__main__":
    main(__doc__, {"ilql": run, "ilql_300": partial(run, steps=300, tau=0.95)}, Path("runs/randomwalks/ilql"))
