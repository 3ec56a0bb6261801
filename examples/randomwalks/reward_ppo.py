"""PPO on a learned reward: how it exploits the gaps of a reward model, and two ways to prevent that.

    python examples/randomwalks/reward_ppo.py [--seeds 3] [--problem 44] [--directory runs/randomwalks/reward_ppo]

The reward model of `examples.randomwalks.reward` has seen only walks along edges, so it cannot know that a walk along
edges that do not exist is worthless: short fake walks look best of all. Without a constraint, PPO finds the fakes. A KL
penalty to the model that imitates walks prevents it, and so does a table of the allowed edges. `trlx-like audit`
reports the first of the three runs, because its walks are very unlikely under the model that it started from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import torch

import trlx_like
from examples import configurations
from examples.problems import Draw, add_options, draws, summary
from examples.randomwalks.reward import run
from examples.randomwalks.seeds import WALKS
from examples.randomwalks.start import train_start
from examples.randomwalks.task import RandomWalks
from trlx_like import RewardModel

WAYS: dict[str, tuple[float, bool]] = {
    "reward model alone": (0.0, False),
    "with a KL penalty of .3": (0.3, False),
    "with edges only": (0.0, True),
}
"""For each run the weight of the KL penalty, and whether only edges of the graph are allowed."""


def tune(
    task: RandomWalks, start: Path, reward: Path, directory: Path, seed: int, kl: float, edges_only: bool
) -> dict[str, Any]:
    """Train PPO from `start` on the reward model in `reward`; return the last metrics."""
    config = configurations.load("ppo_randomwalks").evolve(
        model={"model_path": str(start)},
        # Learned rewards have any mean and unit, so that advantages are whitened. The walk that such a reward likes
        # best may be the one about which it is most wrong, and is not repeated.
        method={"init_kl_coef": kl, "whiten_advantages": True, "gen_experience_kwargs": None}
        | {"replay_best": False, "num_rollouts": 192, "chunk_size": 192},
        train={"seed": seed, "checkpoint_dir": str(directory), "resume_from_checkpoint": None},
    )
    trainer = trlx_like.train(
        config,
        RewardModel(reward),
        task.prompts,
        eval_prompts=task.eval_prompts * WALKS,
        metric_fn=task.metric_fn,
        logit_mask=task.logit_mask() if edges_only else None,
    )
    metrics: dict[str, Any] = trainer.last_metrics
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1000, Path("runs/randomwalks/reward_ppo"), "graph")
    torch.set_num_threads(1)
    drawn = draws(parser.parse_args())
    ends: dict[str, list[float]] = {name: [] for name in WAYS}
    for draw in drawn:
        folder, task = draw.directory, RandomWalks(draw.problem)
        run(Draw(draw.seed, draw.problem, folder / "reward"))
        start = folder / "start" / "hf_model"
        train_start(folder / "start", task=task, seed=draw.seed).save_pretrained(start)
        for number, (name, (kl, edges_only)) in enumerate(WAYS.items()):
            reward = folder / "reward" / "hf_model"
            found = tune(task, start, reward, folder / f"ppo{number}", draw.seed, kl, edges_only)
            ends[name].append(found["metrics/optimality"])
            print(
                f"graph {draw.problem}, seed {draw.seed}, {name:<23}: learned reward {found['reward/mean']:5.2f}, "
                f"optimality {ends[name][-1]:.3f}",
                flush=True,
            )
    for name, values in ends.items():
        print(f"optimality, {name}: {summary(drawn, values)}")
