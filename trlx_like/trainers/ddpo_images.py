"""Images as reward functions see them, their evaluation, and their files in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trlx_like.samplers.diffusion import Trajectories, as_pictures
from trlx_like.tracking import EVALUATION
from trlx_like.tracking.pictures import write_grid
from trlx_like.trainers.evaluation import means, rate
from trlx_like.trainers.samples import log_rows
from trlx_like.trainers.scoring import Row

if TYPE_CHECKING:
    from trlx_like.trainers.ddpo import DDPOTrainer

FOLDER = "images"
SHOWN = 16
"""Images of a round that are kept for the picture of it."""


def image_rows(images: Trajectories, kind: str) -> list[Row]:
    """What a function may see of images. kind: "pil" or "tensor"."""
    seen = as_pictures(images.images) if kind == "pil" else list(images.images)
    rows = zip(seen, images.captions.texts, images.captions.metadata, strict=True)
    # An image has no tokens, so its reward is a number.
    return [{"images": image, "prompts": text, "metadata": row, "length": 0} for image, text, row in rows]


def evaluate_images(trainer: DDPOTrainer) -> dict[str, float]:
    """Metrics over the evaluation prompts: `reward/mean`, `reward/std`, `metrics/<name>`.

    Every evaluation starts from the same noise. Its images go to images/step_<n>/ in the run folder and, with what they
    got, to the trackers as a table.
    """
    if trainer.eval_prompts is None:
        return {}
    torch.manual_seed(trainer.config.train.seed + trainer.group.rank)
    captions, size = trainer.own(trainer.eval_prompts), trainer.method.chunk_size
    seen, shown = list[Row](), list[Row]()
    for start in range(0, len(captions), size):
        images = trainer.make_images(captions[start : start + size])
        if images is not None:
            seen += image_rows(images, trainer.method.image_type)
            pairs = zip(images.captions.texts, as_pictures(images.images), strict=True)
            shown += [{"prompt": text, "picture": picture} for text, picture in pairs]
    rate(trainer, seen, shown)
    rows = trainer.group.join(shown)
    metrics = means(rows)
    _write(trainer, rows)
    return metrics


def _write(trainer: DDPOTrainer, rows: list[Row]) -> None:
    """Files, and the table of them."""
    if trainer.tracker is None or not trainer.group.main:
        return
    step = trainer.progress.step
    folder = Path(FOLDER) / f"step_{step:0{len(str(trainer.config.train.total_steps))}d}"
    (trainer.run.directory / folder).mkdir(parents=True, exist_ok=True)
    pictures = [row.pop("picture") for row in rows]
    for place, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
        row["image"] = str(folder / f"{place:03d}.png")
        picture.save(trainer.run.directory / row["image"])
    captions = [_caption(row["prompt"], row.get("reward")) for row in rows]
    write_grid(pictures, captions, trainer.run.directory / folder.with_suffix(".png"))
    log_rows(trainer, EVALUATION, rows, step)


def write_round(trainer: DDPOTrainer, pictures: list[Any], prompts: list[str], rewards: list[float | None]) -> None:
    """A picture of some of a round's images, every `method.grid_interval` rounds."""
    number, interval = trainer.progress.round + 1, trainer.method.grid_interval
    if interval is None or number % interval or not trainer.group.main or not pictures:
        return
    texts = [_caption(text, reward) for text, reward, _ in zip(prompts, rewards, pictures, strict=False)]
    write_grid(pictures, texts, trainer.run.directory / FOLDER / f"round_{number:05d}.png")


def _caption(prompt: str, reward: float | None) -> str:
    return prompt if reward is None else f"{prompt}\n{reward:.4g}"
