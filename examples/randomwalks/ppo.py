"""PPO finds shortest paths: a GPT-2 first imitates random walks, then is rewarded for short ones.

    python -m examples.randomwalks.ppo [--seed 1000] [--steps 100] [--directory runs/randomwalks]

Also the start of `configs/ppo_randomwalks.yml`, whose model is `sft_start` below.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import trlx_like
from examples.randomwalks.task import RandomWalks, metric_fn, model_config, reward_fn, tokenizer
from trlx_like import TRLConfig

GEN_KWARGS = {"max_new_tokens": 10, "top_k": 0, "top_p": 1.0, "do_sample": True}


def sft_config(directory: str | Path, seed: int = 1000) -> TRLConfig:
    return TRLConfig.from_dict(
        {
            "model": {"model_path": model_config()},
            "tokenizer": {"tokenizer_path": tokenizer()},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-3}},
            "train": {
                "trainer": "SFTTrainer",
                "total_steps": 60,
                "epochs": 100,
                "seq_length": 12,
                "batch_size": 100,
                "eval_interval": 1000,
                "checkpoint_dir": str(directory),
                "save_best": False,
                "seed": seed,
            },
            "method": {"name": "SFTConfig", "gen_kwargs": GEN_KWARGS},
        }
    )


def ppo_config(model_path: str | Path, directory: str | Path, seed: int = 1000, steps: int = 100) -> TRLConfig:
    return TRLConfig.from_dict(
        {
            "model": {"model_path": str(model_path)},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 3e-4}},
            "train": {
                "trainer": "PPOTrainer",
                "total_steps": steps,
                "epochs": 1000,
                "seq_length": 12,
                "batch_size": 100,
                "eval_interval": 20,
                "checkpoint_interval": 1000,
                "checkpoint_dir": str(directory),
                "save_best": False,
                "seed": seed,
            },
            "method": {
                "name": "PPOConfig",
                "num_rollouts": 100,
                "chunk_size": 100,
                "ppo_epochs": 4,
                "init_kl_coef": 0.0,
                "cliprange_reward": 1,
                "vf_coef": 1.2,
                "lam": 0.95,
                "gen_kwargs": GEN_KWARGS,
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1000, help="of the training; the graph stays the same")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps of PPO")
    parser.add_argument("--directory", type=Path, default=Path("runs/randomwalks"), help="where the runs go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = RandomWalks()
    begin = time.process_time()
    sft = trlx_like.train(
        sft_config(arguments.directory / "sft", arguments.seed),
        samples=task.samples,
        eval_prompts=task.eval_prompts,
        metric_fn=metric_fn,
    )
    middle = time.process_time()
    sft.save_pretrained(arguments.directory / "start")
    trainer = trlx_like.train(
        ppo_config(arguments.directory / "start", arguments.directory / "ppo", arguments.seed, arguments.steps),
        reward_fn=reward_fn,
        prompts=task.prompts,
        eval_prompts=task.eval_prompts * 5,
        metric_fn=metric_fn,
    )
    print(trainer.clock.cpu, middle - begin, time.process_time() - middle)


if __name__ == "__main__":
    main()
