"""Train a reward model of walks on noisy comparisons, and test whether it recovers the score behind them.

    python examples/randomwalks/reward.py [--seed 1000] [--seeds 5] [--directory runs/randomwalks/reward]

Two walks from the same node make a pair. The better one is preferred with log-odds of `LOG_ODDS` times the difference
in optimality: at a difference of 0.2, three of four preferences are right. Held-out pairs consist of other walks, and
their preferences are all right.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import numpy as np
import torch

import trlx_like
from examples import configurations
from examples.randomwalks.task import RandomWalks, default_task
from trlx_like.rewards.models import RewardModel

LOG_ODDS = 5.0
HELD_OUT = 300
"""How many of the 1000 walks are used in held-out pairs only."""


def preferences() -> list[dict[str, str]]:
    """Return noisy pairs to train on."""
    task = default_task()
    return pairs(task, task.samples[:-HELD_OUT], 2000, noisy=True)


def eval_preferences() -> list[dict[str, str]]:
    """Return pairs of held-out walks, all in the true order."""
    return pairs(default_task(), held_out(), 300, noisy=False)


def held_out() -> list[str]:
    """Return the walks that are in no training pair."""
    samples = default_task().samples
    return sorted(set(samples[-HELD_OUT:]) - set(samples[:-HELD_OUT]))


def pairs(task: RandomWalks, walks: Sequence[str], count: int, noisy: bool) -> list[dict[str, str]]:
    """Draw `count` pairs of walks that start at the same node and differ in score. The first letter is the prompt."""
    rng = random.Random(0)
    score = dict(zip(walks, task.optimality(walks), strict=True))
    found = []
    for better, worse in combinations(sorted(score, key=lambda walk: (-score[walk], walk)), 2):
        gap = score[better] - score[worse]
        if better[0] == worse[0] and gap > 0:
            wrong = noisy and rng.random() > 1 / (1 + math.exp(-LOG_ODDS * gap))
            chosen, rejected = (worse, better) if wrong else (better, worse)
            found.append({"prompt": better[0], "chosen": chosen[1:], "rejected": rejected[1:]})
    return rng.sample(found, count)


def run(seed: int, directory: Path) -> dict[str, Any]:
    """Train a reward model; return its metrics, and the correlation of reward and optimality on held-out walks."""
    started = time.process_time()
    config = configurations.load("reward_randomwalks")
    trainer = trlx_like.train(config.evolve(train={"checkpoint_dir": str(directory), "seed": seed}))
    walks = held_out()
    prompts, outputs = [walk[0] for walk in walks], [walk[1:] for walk in walks]
    trainer.save_pretrained(directory / "hf_model")
    rewards = RewardModel(directory / "hf_model")(samples=walks, prompts=prompts, outputs=outputs)
    correlation = np.corrcoef(rewards, default_task().optimality(walks))[0, 1]
    return {**trainer.last_metrics, "correlation": float(correlation), "seconds": time.process_time() - started}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1000, help="of everything random in training")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed up")
    parser.add_argument("--directory", type=Path, default=Path("runs/randomwalks/reward"), help="where the runs go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("seed  held-out pairs in order  correlation with optimality  CPU seconds")
    for number in range(arguments.seed, arguments.seed + arguments.seeds):
        result = run(number, arguments.directory / f"seed{number}")
        order, correlation = result["eval/rewards/accuracies"], result["correlation"]
        print(f"{number}  {order:22.3f}  {correlation:27.3f}  {result['seconds']:11.1f}", flush=True)
