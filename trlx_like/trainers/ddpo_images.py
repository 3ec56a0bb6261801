"""Images as reward functions see them, and their files and tables in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from trlx_like.rewards.runner import Scores
from trlx_like.samplers.diffusion import Trajectories, as_pictures
from trlx_like.tracking import EVALUATION, IMAGE, TRAINING
from trlx_like.tracking.pictures import Picture, table_grid
from trlx_like.trainers.context import Metrics, Row, Run
from trlx_like.trainers.evaluation import means
from trlx_like.trainers.scoring import reward_columns

logger = logging.getLogger(__name__)

FOLDER = "images"
SHOWN = 16
"""Images of a round that are shown."""


def image_rows(images: Trajectories, kind: str) -> list[Row]:
    """Return what a function may see of each image, as a PIL image or a tensor by `kind`."""
    seen = as_pictures(images.images) if kind == "pil" else list(images.images)
    rows = zip(seen, images.captions.texts, images.captions.metadata, strict=True)
    # An image has no tokens, so its reward is a number.
    return [{"images": image, "prompts": text, "metadata": row, "length": 0} for image, text, row in rows]


def evaluation_rows(chunks: Iterable[Trajectories], kind: str) -> tuple[list[Row], list[Row]]:
    """Return what functions may see of each image, and its row in the table."""
    seen, shown = list[Row](), list[Row]()
    for images in chunks:
        seen += image_rows(images, kind)
        pairs = zip(images.captions.texts, as_pictures(images.images), strict=True)
        shown += [{"prompt": text, IMAGE: picture} for text, picture in pairs]
    return seen, shown


def show_evaluation(run: Run, rows: Sequence[Row]) -> Metrics:
    """Write the rated images of all processes to images/step_<n>/ and the trackers; return their metrics."""
    step = run.progress.step
    show(run, EVALUATION, f"step_{step:0{len(str(run.config.train.total_steps))}d}", rows, step)
    return means(rows)


class ShownImages:
    """Keep the main process's first images of a round, every `interval` rounds (None: never)."""

    def __init__(self, run: Run, interval: int | None) -> None:
        self.run = run
        self.round = run.progress.round + 1
        is_due = interval is not None and self.round % interval == 0
        self.left = SHOWN if is_due and run.world.main else 0
        self.rows: list[Row] = []

    def add(self, images: Trajectories, scores: Scores) -> None:
        """Take the next images of the round, and keep those that will be shown."""
        pictures = as_pictures(images.images[: self.left])
        self.left -= len(pictures)
        for place, picture in enumerate(pictures):
            columns = reward_columns(scores.rewards, scores.components, place)
            self.rows.append({"prompt": images.captions.texts[place], **columns, IMAGE: picture})

    def log(self, advantages: Sequence[float | None]) -> None:
        """Show them with their advantages (None: not learned from), under the step that comes next."""
        for row, advantage in zip(self.rows, advantages, strict=False):
            row["advantage"] = advantage
        show(self.run, TRAINING, f"round_{self.round:05d}", self.rows, self.run.progress.step + 1)


def show(run: Run, table: str, name: str, rows: Sequence[Row], step: int) -> None:
    """Write rows with a PIL image each to images/<name>/, together to images/<name>.png, and to the trackers."""
    if run.tracker is None or not run.world.main or not rows:
        return
    directory, folder = run.folder.directory, Path(FOLDER) / name
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
    run.log_table(table, rows, step)
