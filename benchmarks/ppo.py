"""Measure PPO: CPU seconds per phase.

    python -m benchmarks.ppo [--layers 6 --width 144 --vocabulary 24] [--prompt 1 --response 10] [--json out.json]
    python -m benchmarks.ppo --adapter 8 --engine copy [--dtype bfloat16]

The model is a GPT-2 with random weights, on random prompts and with a reward without cost, so that the library itself
is measured. The default is the size of the randomwalks example; `--layers 12 --width 768 --vocabulary 50257` is GPT-2.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast

import trlx_like
from benchmarks.measure import arguments, measure, show
from trlx_like import TRLConfig


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the words "0" to "V-2"; the last id is EOS."""
    words = {str(number): number for number in range(vocabulary - 1)} | {"<eos>": vocabulary - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def config(given: argparse.Namespace, folder: Path) -> TRLConfig:
    eos = given.vocabulary - 1
    model = GPT2Config(
        vocab_size=given.vocabulary,
        n_layer=given.layers,
        n_embd=given.width,
        n_head=given.width // 24 if given.width < 768 else given.width // 64,
        n_positions=given.prompt + given.response,
        eos_token_id=eos,
        bos_token_id=eos,
    )
    adapter = {"peft_type": "LORA", "r": given.adapter, "target_modules": "all-linear"} if given.adapter else None
    return TRLConfig.from_dict(
        {
            "model": {"model_path": model, "num_layers_unfrozen": given.unfrozen, "peft_config": adapter},
            "sampler": {"engine": given.engine, "kwargs": {} if given.dtype is None else {"dtype": given.dtype}},
            "tokenizer": {"tokenizer_path": tokenizer(given.vocabulary)},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-5}},
            "train": {
                "trainer": "PPOTrainer",
                "total_steps": given.steps,
                "epochs": given.steps,
                "seq_length": given.prompt + given.response,
                "batch_size": given.batch_size,
                "eval_interval": given.steps + 1,
                "checkpoint_interval": given.steps + 1,
                "checkpoint_dir": str(folder),
            },
            "method": {
                "name": "PPOConfig",
                "num_rollouts": given.rollouts,
                "chunk_size": given.rollouts,
                "ppo_epochs": given.epochs,
                "gen_kwargs": {"max_new_tokens": given.response},
            },
        }
    )


def reward(outputs: list[str]) -> list[float]:
    return [float(len(output) % 7) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("layers", 6, "blocks of the model"),
        ("width", 144, "its hidden size"),
        ("vocabulary", 24, "its tokens"),
        ("unfrozen", -1, "top blocks that are trained; -1: all"),
        ("prompt", 1, "tokens of a prompt"),
        ("response", 10, "tokens of a response, at most"),
        ("rollouts", 128, "responses a round"),
        ("batch-size", 64, "responses an optimiser step"),
        ("epochs", 4, "passes over a round"),
        ("steps", 32, "optimiser steps"),
        ("adapter", 0, "rank of a LoRA adapter; 0: all weights are trained"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--engine", default="transformers", help="that generates (default transformers)")
    parser.add_argument("--dtype", help="of the engine's weights (default: those of the model)")
    given = arguments(parser)
    rng = random.Random(0)
    prompts = [" ".join(str(rng.randrange(given.vocabulary - 1)) for _ in range(given.prompt)) for _ in range(512)]

    def run(folder: Path, callbacks: list[Any]) -> Any:
        return trlx_like.train(config(given, folder), reward, prompts, eval_prompts=prompts[:1], callbacks=callbacks)

    show(measure(run), given.json)


if __name__ == "__main__":
    main()
