"""Train a reward model of walks on noisy comparisons, and test whether it recovers the score behind them.

    python examples/randomwalks/reward.py [--seed 1000] [--seeds 10] [--directory runs/randomwalks/reward]

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
from examples.problems import Draw, add_options, draws, summary
from examples.randomwalks.task import RandomWalks, default_task
from trlx_like.rewards.models import RewardModel

LOG_ODDS = 5.0
HELD_OUT, PAIRS, HELD_OUT_PAIRS = 300, 2000, 300
"""How many of the 1000 walks are in held-out pairs only, and the largest numbers of pairs of both kinds."""


def preferences() -> list[dict[str, str]]:
    """Return noisy pairs to train on."""
    return drawn_pairs(default_task())[0]


def eval_preferences() -> list[dict[str, str]]:
    """Return pairs of held-out walks, all in the true order."""
    return drawn_pairs(default_task())[1]


def drawn_pairs(task: RandomWalks) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return noisy pairs of walks through a graph to train on, and pairs of held-out walks in the true order."""
    training = pairs(task, task.samples[:-HELD_OUT], PAIRS, noisy=True)
    return training, pairs(task, held_out(task), HELD_OUT_PAIRS, noisy=False)


def held_out(task: RandomWalks) -> list[str]:
    """Return the walks that are in no training pair."""
    samples = task.samples
    return sorted(set(samples[-HELD_OUT:]) - set(samples[:-HELD_OUT]))


def pairs(task: RandomWalks, walks: Sequence[str], count: int, noisy: bool) -> list[dict[str, str]]:
    """Draw at most `count` pairs of walks from the same node with different scores. The first letter is the prompt."""
    rng = random.Random(0)
    score = dict(zip(walks, task.optimality(walks), strict=True))
    found = []
    for better, worse in combinations(sorted(score, key=lambda walk: (-score[walk], walk)), 2):
        gap = score[better] - score[worse]
        if better[0] == worse[0] and gap > 0:
            wrong = noisy and rng.random() > 1 / (1 + math.exp(-LOG_ODDS * gap))
            chosen, rejected = (worse, better) if wrong else (better, worse)
            found.append({"prompt": better[0], "chosen": chosen[1:], "rejected": rejected[1:]})
    return rng.sample(found, min(count, len(found)))


def run(draw: Draw) -> dict[str, Any]:
    """Train a reward model; return its metrics, and the correlation of reward and optimality on held-out walks."""
    started = time.process_time()
    config = configurations.load("reward_randomwalks")
    task, directory = RandomWalks(draw.problem), draw.directory
    training, evaluated = drawn_pairs(task)
    config = config.evolve(train={"checkpoint_dir": str(directory), "seed": draw.seed})
    trainer = trlx_like.train(config, preferences=training, eval_preferences=evaluated)
    walks = held_out(task)
    prompts, outputs = [walk[0] for walk in walks], [walk[1:] for walk in walks]
    trainer.save_pretrained(directory / "hf_model")
    rewards = RewardModel(directory / "hf_model")(samples=walks, prompts=prompts, outputs=outputs)
    correlation = np.corrcoef(rewards, task.optimality(walks))[0, 1]
    return {**trainer.last_metrics, "correlation": float(correlation), "seconds": time.process_time() - started}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1000, Path("runs/randomwalks/reward"), "graph")
    drawn, orders = draws(parser.parse_args()), []
    torch.set_num_threads(1)
    print("graph  seed  held-out pairs in order  correlation with optimality  CPU seconds")
    for draw in drawn:
        result = run(draw)
        orders.append(result["eval/rewards/accuracies"])
        numbers = f"{orders[-1]:22.3f}  {result['correlation']:27.3f}  {result['seconds']:11.1f}"
        print(f"{draw.problem:5}  {draw.seed}  {numbers}", flush=True)
    print(f"in order: {summary(drawn, orders)}")
