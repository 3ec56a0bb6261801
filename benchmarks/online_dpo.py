"""Measure Online DPO: CPU seconds per step and phase.

    python -m benchmarks.online_dpo [--layers 6 --width 144 --vocabulary 2000] [--batch-size 8] [--json out.json]

The model is a GPT-2 with random weights, on random prompts of 16 tokens, with two responses of at most 48 tokens to
each, and a reward without cost or ties. The default has 1.8M parameters. "training" excludes making the model and
writing the run folder.
"""

from __future__ import annotations

import argparse
import random
import zlib
from pathlib import Path
from typing import Any

from transformers import GPT2Config

import trlx_like
from benchmarks.measure import arguments, measure, show
from benchmarks.ppo import tokenizer
from trlx_like import TRLConfig


def config(given: argparse.Namespace, folder: Path) -> TRLConfig:
    eos, length = given.vocabulary - 1, given.prompt + given.response
    model = GPT2Config(
        vocab_size=given.vocabulary,
        n_layer=given.layers,
        n_embd=given.width,
        n_head=given.width // 24 if given.width < 768 else given.width // 64,
        n_positions=max(length, given.positions),
        eos_token_id=eos,
        bos_token_id=eos,
    )
    return TRLConfig.from_dict(
        {
            "model": {"model_path": model, "num_layers_unfrozen": given.unfrozen},
            "tokenizer": {"tokenizer_path": tokenizer(given.vocabulary)},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 5e-7}},
            "backend": {"gradient_checkpointing": given.checkpointing},
            "train": {
                "trainer": "OnlineDPOTrainer",
                "total_steps": given.steps,
                "epochs": given.steps,
                "seq_length": length,
                "batch_size": given.batch_size,
                "eval_interval": given.steps + 1,
                "checkpoint_interval": given.steps + 1,
                "save_optimizer": False,
                "checkpoint_dir": str(folder),
            },
            "method": {"name": "OnlineDPOConfig", "gen_kwargs": {"max_new_tokens": given.response, "temperature": 0.9}},
        }
    )


def reward(outputs: list[str]) -> list[float]:
    return [float(zlib.crc32(output.encode())) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("layers", 6, "blocks of the model"),
        ("width", 144, "its hidden size"),
        ("vocabulary", 2000, "its tokens"),
        ("positions", 1024, "its positions"),
        ("unfrozen", -1, "top blocks that are trained; -1: all"),
        ("prompt", 16, "tokens of a prompt"),
        ("response", 48, "tokens of a response, at most"),
        ("batch-size", 8, "prompts an optimiser step"),
        ("steps", 20, "optimiser steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    given = arguments(parser)
    rng = random.Random(0)
    prompts = [" ".join(str(rng.randrange(given.vocabulary - 1)) for _ in range(given.prompt)) for _ in range(512)]

    def run(folder: Path, callbacks: list[Any]) -> Any:
        return trlx_like.train(config(given, folder), reward, prompts, eval_prompts=prompts[:1], callbacks=callbacks)

    results = measure(run)
    training = sum(seconds for phase, seconds in results["phases"].items() if phase not in ("rest", "evaluate"))
    results["training_cpu_seconds_per_step"] = round(training / results["steps"], 4)
    show(results, given.json)


if __name__ == "__main__":
    main()
