"""Images as reward functions see them, their evaluation, and their files in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trlx_like.rewards.runner import Scores
from trlx_like.samplers.diffusion import Trajectories, as_pictures
from trlx_like.tracking import EVALUATION, IMAGE, TRAINING
from trlx_like.tracking.pictures import Picture, table_grid
from trlx_like.trainers.evaluation import means, rate
from trlx_like.trainers.samples import log_rows, reward_columns
from trlx_like.trainers.scoring import Row

if TYPE_CHECKING:
    from trlx_like.trainers.ddpo import DDPOTrainer

logger = logging.getLogger(__name__)

FOLDER = "images"
SHOWN = 16
"""Images of a round that are shown."""


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
    torch.manual_seed(trainer.config.train.seed + trainer.world.rank)
    captions, size = trainer.own(trainer.eval_prompts), trainer.method.chunk_size
    seen, shown = list[Row](), list[Row]()
    for start in range(0, len(captions), size):
        images = trainer.make_images(captions[start : start + size])
        if images is not None:
            seen += image_rows(images, trainer.method.image_type)
            pairs = zip(images.captions.texts, as_pictures(images.images), strict=True)
            shown += [{"prompt": text, IMAGE: picture} for text, picture in pairs]
    rate(trainer, seen, shown)
    rows = trainer.world.join(shown)
    step = trainer.progress.step
    show(trainer, EVALUATION, f"step_{step:0{len(str(trainer.config.train.total_steps))}d}", rows, step)
    return means(rows)


class ShownImages:
    """The main process's first images of a round, every `method.grid_interval` rounds."""

    def __init__(self, trainer: DDPOTrainer) -> None:
        self.trainer = trainer
        self.round, interval = trainer.progress.round + 1, trainer.method.grid_interval
        is_due = interval is not None and self.round % interval == 0
        self.left = SHOWN if is_due and trainer.world.main else 0
        self.rows: list[Row] = []

    def add(self, images: Trajectories, scores: Scores) -> None:
        """The next images of the round, of which those are kept that are to be shown."""
        pictures = as_pictures(images.images[: self.left])
        self.left -= len(pictures)
        for place, picture in enumerate(pictures):
            columns = reward_columns(scores.rewards, scores.components, place)
            self.rows.append({"prompt": images.captions.texts[place], **columns, IMAGE: picture})

    def log(self, advantages: Sequence[float | None]) -> None:
        """Shows them with their advantages, at the step that is made next, as the metrics of the round are."""
        for row, advantage in zip(self.rows, advantages, strict=False):
            row["advantage"] = advantage
        show(self.trainer, TRAINING, f"round_{self.round:05d}", self.rows, self.trainer.progress.step + 1)


def show(trainer: DDPOTrainer, table: str, name: str, rows: Sequence[Row], step: int) -> None:
    """Rows with a PIL image each: as files in images/<name>/, together in images/<name>.png, and to the trackers."""
    if trainer.tracker is None or not trainer.world.main or not rows:
        return
    directory, folder = trainer.run.directory, Path(FOLDER) / name
    (directory / folder).mkdir(parents=True, exist_ok=True)
    for place, row in enumerate(rows):
        picture = Picture(directory, (folder / f"{place:03d}.png").as_posix())
        row[IMAGE].save(picture.file)
        row[IMAGE] = picture
    together = (directory / folder).with_suffix(".png")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    all_of_them = table_grid(columns, [[row.get(name) for name in columns] for row in rows])
    assert all_of_them is not None
    all_of_them.save(together)
    logger.info("Images: %s", together)
    log_rows(trainer, table, rows, step)
