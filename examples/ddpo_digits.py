"""Tune a small text-to-image model of handwritten digits towards small JPEG files, with and without a KL penalty.

    pip install -e ".[diffusion,examples]"
    python examples/ddpo_digits.py [--seed 1] [--seeds 3] [--directory runs/digits] [--grid before_after.png]

The data are the 1,797 scans of 8 x 8 pixels in scikit-learn. A pipeline of diffusers learns to draw them from the words
"zero" to "nine" (kept in the cache of the examples). Then DDPO tunes it three times from there: for small JPEG files,
for small files with a KL penalty to the first model, and for brightness. A classifier trained on the real scans tells
which drawings still show the requested digit. The lesson: the reward does not ask for digits, so without the KL penalty
they are lost.
"""

from __future__ import annotations

import argparse
import functools
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from examples.assets import cached
from examples.pictures import Result, Task, grid, table, train_denoiser, tune
from examples.problems import Draw, add_options, draws, summary
from trlx_like import DDPOConfig, ModelConfig, OptimizerConfig, TrainConfig, TRLConfig
from trlx_like.rewards.images import brightness, jpeg_compressibility

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PRETRAINING_STEPS = 950
"""Number of pretraining steps, each on 64 scans."""


# The base model.


@functools.cache
def scans() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [1797, 8, 8] from 0 to 1, and the digits [1797]."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels).reshape(-1, 8, 8) / 16, np.asarray(labels)


def new_pipeline() -> Any:
    """Make a small Stable Diffusion with random weights and without a VAE: it denoises pixels."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [letter + end for end in ("", "</w>") for letter in string.ascii_lowercase]
    vocabulary = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    ids: dict[str, Any] = {"vocab_size": len(vocabulary), "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    parts: Any = diffusers  # whose types refuse a pipeline without a VAE
    unet = parts.UNet2DConditionModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(24, 48),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return parts.StableDiffusionPipeline(
        vae=None,
        text_encoder=CLIPTextModel(CLIPTextConfig(**ids, **sizes, max_position_embeddings=8)),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=8),
        unet=unet,
        scheduler=parts.DDIMScheduler(timestep_spacing="trailing", clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def pretrain(pipeline: Any, steps: int = PRETRAINING_STEPS) -> list[float]:
    """Train UNet and text encoder on the scans; return the mean squared error of the noise at each step."""
    pixels, labels = (torch.from_numpy(array) for array in scans())
    words = pipeline.tokenizer(DIGITS, padding="max_length", return_tensors="pt").input_ids  # [10, 8]

    def encode(rows: Tensor) -> Tensor:
        embeds: Tensor = pipeline.text_encoder(words)[0]
        return embeds[labels[rows]]

    return train_denoiser(pipeline, pixels.float()[:, None] * 2 - 1, encode, steps=steps)


def base(seed: int) -> Path:
    """Return the folder of the pipeline that draws digits, which the first call trains."""

    def make(folder: Path) -> None:
        torch.manual_seed(seed)
        pipeline, began = new_pipeline(), time.process_time()
        losses = pretrain(pipeline)
        pipeline.save_pretrained(folder)
        size = sum(weights.numel() for weights in pipeline.unet.parameters())
        seconds = time.process_time() - began
        print(f"base, seed {seed}: {size:,} weights, loss {np.mean(losses[-100:]):.3f}, {seconds:.0f} CPU s")

    return cached(f"digits-v2-seed{seed}", make)


# The rewards and metrics.


def enlarged(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Enlarge to 16 x 16, so that a file is more than its header."""
    return [image.resize((16, 16), Image.Resampling.BILINEAR) for image in images]


def small_files(images: Sequence[Image.Image], **_: Any) -> list[float]:
    """Reward small JPEG files: minus the kilobytes."""
    return jpeg_compressibility(enlarged(images))


@functools.cache
def classifier() -> Any:
    """Fit a support vector machine to the real scans; its five-fold cross-validated accuracy is .99."""
    from sklearn.svm import SVC

    pixels, labels = scans()
    machine: Any = SVC  # whose types know gamma as text only
    return machine(gamma=0.03, C=10.0).fit(pixels.reshape(-1, 64), labels)


def metric_fn(images: Sequence[Image.Image], prompts: Sequence[str], **_: Any) -> dict[str, list[float]]:
    """Measure the bytes of the JPEG file, the brightness, and whether it shows the digit of the prompt."""
    pixels = np.stack([np.asarray(image).reshape(64) / 255 for image in images])
    seen = classifier().predict(pixels)
    return {
        "bytes": [-1000 * score for score in small_files(images)],
        "brightness": brightness(images),
        "right": [float(DIGITS[digit] == prompt) for digit, prompt in zip(seen, prompts, strict=True)],
    }


# The runs.


SAMPLES = 128
# How light a digit is depends little on which it is, so drawings of one digit are compared among each other.
GROUPS = {"advantages": "group", "num_generations": 8, "chunk_size": SAMPLES // 8}
TASKS = [
    Task("small files", small_files, 18),
    Task("small files, KL 1.0", small_files, 18, options={"beta": 1.0}),
    Task("light", brightness, 14, options=GROUPS),
]
SHOWN = {"bytes": ".0f", "brightness": ".2f", "right": ".2f"}


def config(task: Task, model: Path, seed: int, directory: Path) -> TRLConfig:
    return TRLConfig(
        model=ModelConfig(model_path=str(model), model_arch_type="diffusion", model_extra_configs={"vae": None}),
        optimizer=OptimizerConfig(name="adamw", kwargs={"lr": task.rate, "weight_decay": 1e-4}),
        method=DDPOConfig(
            num_inference_steps=10,
            guidance_scale=1.0,
            num_samples=SAMPLES,
            **{"chunk_size": SAMPLES, **task.options},
        ),
        train=TrainConfig(
            trainer="DDPOTrainer",
            seed=seed,
            batch_size=SAMPLES // 2,
            epochs=task.rounds,
            total_steps=2 * task.rounds,
            eval_interval=2 * task.rounds,
            checkpoint_interval=2 * task.rounds,
            checkpoint_dir=str(directory),
        ),
    )


def run(task: Task, draw: Draw, directory: Path) -> Result:
    """Tune a base model, and evaluate it on 200 drawings."""
    return tune(task, config(task, base(draw.problem), draw.seed, directory), DIGITS, metric_fn, repeats=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1, Path("runs/digits"), "base model")
    parser.add_argument("--grid", type=Path, help="a picture of the first seed's drawings, before and after")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[int, list[Result]] = {}
    drawn = draws(given)
    for draw in drawn:
        seed = draw.seed
        results[seed] = []
        for task in TASKS:
            results[seed].append(run(task, draw, draw.directory / task.name.replace(" ", "_")))
            print(table({seed: results[seed][-1:]}, SAMPLES, SHOWN), flush=True)
    if given.grid:
        grid(results[given.seed], DIGITS, given.grid)
    print(f"\n{table(results, SAMPLES, SHOWN)}\n\n{lesson(results)}\n")
    for place, (name, worst) in enumerate((("bytes", max), ("bytes", max), ("brightness", min))):
        ends = [found[place].after[name] for found in results.values()]
        print(f"{name}, tuned for {TASKS[place].name}: {summary(drawn, ends, 2, worst)}")


def lesson(results: dict[int, list[Result]]) -> str:
    """Return the lesson as a sentence with the numbers of these runs."""
    free, held = ([found[place].after["right"] for found in results.values()] for place in (0, 1))
    return (
        f"Of the drawings that were tuned for small files, {min(free):.2f} to {max(free):.2f} are the digit that was "
        f"asked for, and with the KL {min(held):.2f} to {max(held):.2f}: the reward asks for small files, not for "
        "digits, and what it does not ask for is given up unless something else holds it."
    )


if __name__ == "__main__":
    main()
