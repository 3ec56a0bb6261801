"""Train a T5 to reverse words: first on examples of which about half are wrong, then with a reward for right ones.

    python examples/seq2seq_reverse.py [--seeds 3] [--directory runs/reverse]

SFT imitates the examples with their mistakes. PPO, whose reward measures how right each answer is, surpasses them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedTokenizerFast, T5Config

import trlx_like
from examples.problems import Draw, add_options, draws, summary
from trlx_like import TRLConfig

LETTERS = "abcdefgh"
GENERATION = {"max_new_tokens": 7}
SECTIONS: dict[str, Any] = {
    "model": {"model_path": f"{__file__}:model_config", "model_arch_type": "seq2seq"},
    "tokenizer": {"tokenizer_path": f"{__file__}:tokenizer"},
}
SFT: dict[str, Any] = {
    "method": {"name": "SFTConfig", "gen_kwargs": GENERATION},
    "optimizer": {"name": "adamw", "kwargs": {"lr": 2e-3, "betas": [0.9, 0.95]}},
    "train": {
        "trainer": "SFTTrainer",
        "seq_length": 16,
        "batch_size": 64,
        "total_steps": 500,
        "epochs": 100,
        "eval_interval": 100,
    },
}
PPO: dict[str, Any] = {
    "method": {
        "name": "PPOConfig",
        "gen_kwargs": GENERATION,
        "num_rollouts": 256,
        "chunk_size": 256,
        "init_kl_coef": 0.01,
    },
    "optimizer": {"name": "adamw", "kwargs": {"lr": 5e-4, "betas": [0.9, 0.95]}},
    "train": {**SFT["train"], "trainer": "PPOTrainer", "batch_size": 128, "total_steps": 320, "eval_interval": 40},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter, and EOS after each text as in T5."""
    made = Tokenizer(models.WordLevel({token: row for row, token in enumerate(["<pad>", "</s>", *LETTERS])}))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def model_config() -> PretrainedConfig:
    """Configure a T5 with 0.2 million random weights."""
    sizes: dict[str, Any] = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
    sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5Config(vocab_size=len(tokenizer()), **sizes)


def word(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """Return words and their reversals; in half of these, on average, two letters are swapped."""
    rng = random.Random(seed)
    rows = []
    for prompt in (word(rng) for _ in range(count)):
        letters = list(reversed(prompt))
        if rng.random() < 0.5:
            first, second = rng.sample(range(len(letters)), 2)
            letters[first], letters[second] = letters[second], letters[first]
        rows.append((prompt, "".join(letters)))
    return rows


def reward_fn(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
    """Return the fraction of positions with the right letter; 0 for an answer of another length."""
    return [_alike(prompt[::-1], output) for prompt, output in zip(prompts, outputs, strict=True)]


def _alike(wanted: str, output: str) -> float:
    if len(wanted) != len(output):
        return 0.0
    return sum(a == b for a, b in zip(wanted, output, strict=True)) / len(wanted)


def metric_fn(prompts: list[str], outputs: list[str], **_: Any) -> dict[str, list[float]]:
    """Measure whether the whole word is right."""
    return {"right": [float(output == prompt[::-1]) for prompt, output in zip(prompts, outputs, strict=True)]}


def run(draw: Draw) -> tuple[list[float], float]:
    """Run SFT, then PPO from its model; return the fraction of right answers after each, and CPU seconds."""
    seed, directory, rng = draw.seed, draw.directory, random.Random(draw.problem)
    prompts, eval_prompts = ([word(rng) for _ in range(count)] for count in (2000, 500))
    began = time.process_time()
    changes = {"train.seed": seed, "train.checkpoint_dir": str(directory / "sft")}
    sft = trlx_like.train(
        TRLConfig.update({**SECTIONS, **SFT}, changes),
        samples=examples(4000, draw.problem),
        metric_fn=metric_fn,
        eval_prompts=eval_prompts,
    )
    sft.save_pretrained(directory / "start")
    changes = {
        "train.seed": seed,
        "train.checkpoint_dir": str(directory / "ppo"),
        "model.model_path": str(directory / "start"),
        "tokenizer.tokenizer_path": None,
    }
    config = TRLConfig.update({**SECTIONS, **PPO}, changes)
    ppo = trlx_like.train(config, reward_fn, prompts, metric_fn=metric_fn, eval_prompts=eval_prompts)
    ends = [float(trainer.last_metrics["metrics/right"]) for trainer in (sft, ppo)]
    return ends, time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1, Path("runs/reverse"), "words and of the mistakes in the examples")
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = draws(given)
    results = [run(draw) for draw in drawn]
    print("\nwords  seed  right after SFT  after PPO  CPU seconds")
    for draw, ((after_sft, after_ppo), seconds) in zip(drawn, results, strict=True):
        print(f"{draw.problem:5}  {draw.seed:4}  {after_sft:15.2f}  {after_ppo:9.2f}  {seconds:11.0f}")
    print(f"after PPO: {summary(drawn, [ends[1] for ends, _ in results], 2)}")
