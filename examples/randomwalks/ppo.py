"""PPO finds shortest paths: a GPT-2 first imitates random walks, then is rewarded for short ones.

    python -m examples.randomwalks.ppo [--seed 1000] [--directory runs/randomwalks]

The configurations are configs/sft_randomwalks.yml and configs/ppo_randomwalks.yml. With `--seeds 5` it trains
five times and prints a table.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import trlx_like
from examples.randomwalks.start import train_start
from examples.randomwalks.task import default_task, metric_fn, reward_fn

WALKS = 25  # of 20 nodes: the standard error of a mean is about .007
CONFIG = Path(__file__).parents[2] / "configs" / "ppo_randomwalks.yml"


@dataclass
class Result:
    """Mean optimality over `WALKS` walks from each start node, and CPU seconds of this process."""

    directory: Path
    before: float
    curve: list[float]  # at each evaluation
    start_seconds: float
    ppo_seconds: float


def run(seed: int, directory: Path) -> Result:
    """Start and PPO under one seed (the graph stays the same)."""
    task = default_task()
    began = time.process_time()
    start = train_start(directory / "start", seed=seed)
    start.save_pretrained(directory / "start" / "hf_model")
    between = time.process_time()
    changes = {"model_path": str(directory / "start" / "hf_model")}
    config = trlx_like.TRLConfig.load_yaml(CONFIG).evolve(
        model=changes,
        train={"seed": seed, "checkpoint_dir": str(directory / "ppo"), "resume_from_checkpoint": None},
    )
    trlx_like.train(config, reward_fn, task.prompts, eval_prompts=task.eval_prompts * WALKS, metric_fn=metric_fn)
    ended = time.process_time()
    rows = [json.loads(line) for line in (directory / "ppo" / "metrics.jsonl").read_text().splitlines()]
    curve = [row["metrics/optimality"] for row in rows if "metrics/optimality" in row]
    return Result(directory / "ppo", curve[0], curve, between - began, ended - between)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1000, help="of the training; the graph stays the same")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed up")
    parser.add_argument("--directory", type=Path, default=Path("runs/randomwalks"), help="where the runs go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folders = {seed: given.directory / f"seed{seed}" for seed in range(given.seed, given.seed + given.seeds)}
    if given.seeds == 1:
        folders = {given.seed: given.directory}
    results = {seed: run(seed, folder) for seed, folder in folders.items()}
    print("\nseed  optimality of the start -> every 20 steps of PPO        CPU seconds: start, PPO")
    for seed, result in results.items():
        curve = " ".join(f"{value:.3f}" for value in result.curve[1:])
        print(f"{seed}  {result.before:.3f} -> {curve:<42}{result.start_seconds:10.1f}{result.ppo_seconds:7.1f}")
    last = results[given.seed].directory
    print(f"\nrun folder: {last}\nreport:     {last / 'report.html'}")


if __name__ == "__main__":
    main()
