"""Measure DPO: CPU seconds per step, and peak memory.

    python -m benchmarks.dpo [--layers 6 --width 144 --vocabulary 2000] [--batch-size 8] [--live] [--json out.json]

The model is a GPT-2 with random weights, on random pairs of words: prompts of 16 tokens, completions of 30 with EOS.
The default has 1.8M parameters; `--layers 12 --width 768 --vocabulary 50257 --batch-size 4` is GPT-2. It makes three
passes over the pairs, TRL's default, so each pass bears a third of the cost of precomputing the reference; `--live`
runs a frozen reference in every step instead. "training" excludes making the model and writing the run folder.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from transformers import GPT2Config

import trlx_like
from benchmarks.measure import arguments, measure, show
from benchmarks.ppo import tokenizer
from trlx_like import TRLConfig

PASSES = 3


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
            "model": {"model_path": model},
            "tokenizer": {"tokenizer_path": tokenizer(given.vocabulary)},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-6}},
            "train": {
                "trainer": "DPOTrainer",
                "total_steps": given.steps,
                "epochs": PASSES,
                "seq_length": length,
                "batch_size": given.batch_size,
                "eval_interval": given.steps + 1,
                "checkpoint_interval": given.steps + 1,
                "save_optimizer": False,
                "checkpoint_dir": str(folder),
            },
            "method": {
                "name": "DPOConfig",
                "gen_kwargs": {"max_new_tokens": 1},
                "precompute_ref_log_probs": not given.live,
            },
        }
    )


def preferences(given: argparse.Namespace) -> list[tuple[str, str, str]]:
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(str(rng.randrange(given.vocabulary - 1)) for _ in range(count))

    rows = given.batch_size * given.steps // PASSES
    return [(words(given.prompt), words(given.response - 1), words(given.response - 1)) for _ in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("layers", 6, "blocks of the model"),
        ("width", 144, "its hidden size"),
        ("vocabulary", 2000, "its tokens"),
        ("positions", 1024, "its positions"),
        ("prompt", 16, "tokens of a prompt"),
        ("response", 30, "tokens of a completion"),
        ("batch-size", 8, "pairs an optimiser step"),
        ("steps", 30, "optimiser steps, a multiple of 3"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--live", action="store_true", help="ask a frozen reference in every step")
    given = arguments(parser)
    rows = preferences(given)

    def run(folder: Path, callbacks: list[Any]) -> Any:
        return trlx_like.train(config(given, folder), preferences=rows, callbacks=callbacks)

    results = measure(run)
    training = sum(seconds for phase, seconds in results["phases"].items() if phase not in ("rest", "evaluate"))
    results["training_cpu_seconds_per_step"] = round(training / results["steps"], 4)
    show(results, given.json)


if __name__ == "__main__":
    main()
