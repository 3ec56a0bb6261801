"""Tune a guided text-to-image model of emoji towards small JPEG files, and towards green.

    pip install -e ".[diffusion]"
    python examples/ddpo_emoji.py --model FOLDER --train-base         # first, 36 CPU minutes
    python examples/ddpo_emoji.py --model FOLDER [--task green] [--seeds 3] [--grids FOLDER]

The model has 3 million weights and draws 32 x 32 pixels. It is a pipeline of its own kind, with a vocabulary of words
instead of a text encoder, and without a VAE (`examples/emoji.py`). `examples/emoji_base.py` says what `--train-base`
fetches, who made these pictures, and how the model learns them. Sampling and training use guidance. The reward of a
drawing is compared with those of the same caption, because file sizes differ more between captions than between the
drawings of one caption. Results of three seeds and pictures are in `docs/algorithms/ddpo.md`. Seeds change the tuning
alone: the base model and the captions are the same in all runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import numpy as np
import torch
from PIL import Image

from examples.emoji import load
from examples.emoji_base import train_base
from examples.pictures import Result, Task, grid, table, tune
from trlx_like import DDPOConfig, ModelConfig, OptimizerConfig, TrainConfig, TRLConfig
from trlx_like.rewards.images import jpeg_compressibility

CAPTIONS = [
    "google blue heart",
    "twitter red apple",
    "google angry face",
    "twitter cat face",
    "google mushroom",
    "twitter hamburger",
    "google frog face",
    "twitter sunflower",
]


# The rewards and metrics.


def small_files(images: Sequence[Image.Image], **_: Any) -> list[float]:
    """Reward small JPEG files: minus the kilobytes at 64 x 64 pixels, so that a file is more than its header."""
    return jpeg_compressibility([image.resize((64, 64), Image.Resampling.BILINEAR) for image in images])


def green(images: Sequence[Image.Image], **_: Any) -> list[float]:
    """Reward green: green minus the mean of red and blue, from -1 to 1. White and black are 0."""
    pixels = np.stack([np.asarray(image, dtype=float) for image in images]) / 255
    found: list[float] = (pixels[..., 1] - pixels[..., [0, 2]].mean(axis=-1)).mean(axis=(1, 2)).tolist()
    return found


def metric_fn(images: Sequence[Image.Image], **_: Any) -> dict[str, list[float]]:
    return {"kilobytes": [-score for score in small_files(images)], "green": green(images)}


# The runs.


SAMPLES = 64
"""Number of drawings in a round, eight of each caption."""
TASKS = {"files": Task("small files", small_files, 12, rate=2e-4), "green": Task("green", green, 8, rate=2e-4)}
SHOWN = {"kilobytes": ".2f", "green": ".2f"}


def config(task: Task, model: Path, seed: int, directory: Path) -> TRLConfig:
    return TRLConfig(
        model=ModelConfig(model_path=load(model), model_arch_type="diffusion"),
        # One update per round: in first tries, most ratios of a second update were outside the clip range.
        optimizer=OptimizerConfig(name="adamw", kwargs={"lr": task.rate, "weight_decay": 1e-4}),
        method=DDPOConfig(
            num_inference_steps=5,
            guidance_scale=3.0,
            num_samples=SAMPLES,
            chunk_size=SAMPLES,
            advantages="prompt",
            stat_buffer_size=SAMPLES // len(CAPTIONS),  # the rewards of one round, since they change fast
            stat_min_count=SAMPLES // len(CAPTIONS),
        ),
        train=TrainConfig(
            trainer="DDPOTrainer",
            seed=seed,
            batch_size=SAMPLES,
            epochs=task.rounds,
            total_steps=task.rounds,
            eval_interval=task.rounds,
            checkpoint_interval=task.rounds,
            checkpoint_dir=str(directory),
        ),
    )


def run(task: Task, model: Path, seed: int, directory: Path) -> Result:
    """Tune the model of a folder, and evaluate it on 32 drawings."""
    return tune(task, config(task, model, seed, directory), CAPTIONS, metric_fn, repeats=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the emoji model")
    parser.add_argument("--train-base", action="store_true", help="train that model, and do no more")
    parser.add_argument("--task", choices=list(TASKS), help="what to tune for; both by default")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from the first up")
    parser.add_argument("--directory", type=Path, default=Path("runs/emoji"), help="where the runs go")
    parser.add_argument("--grids", type=Path, help="folder for pictures of the first seed's drawings, before and after")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.train_base:
        if given.model.exists():
            parser.error(f"--model {given.model} exists; --train-base wants the name of a new folder.")
        train_base(given.model, given.seed)
        return
    names = [given.task] if given.task else list(TASKS)
    results: dict[int, list[Result]] = {}
    for seed in range(given.seed, given.seed + given.seeds):
        results[seed] = []
        for name in names:
            results[seed].append(run(TASKS[name], given.model, seed, given.directory / f"seed{seed}" / name))
            print(table({seed: results[seed][-1:]}, SAMPLES, SHOWN), flush=True)
    if given.grids:
        for name, result in zip(names, results[given.seed], strict=True):
            grid([result], CAPTIONS, given.grids / f"ddpo_emoji_{name}.png")
    print(f"\n{table(results, SAMPLES, SHOWN)}")


if __name__ == "__main__":
    main()
