"""Images in the form that reward functions get, and their files and tables in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from trlx_like.errors import writing
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
"""Most images of a round that are saved and logged."""


def image_rows(images: Trajectories, kind: str) -> list[Row]:
    """Return the arguments of a reward function for each image.

    Args:
        images: The sampled images.
        kind: "pil" passes PIL images, anything else tensors.
    """
    seen = as_pictures(images.images) if kind == "pil" else list(images.images)
    rows = zip(seen, images.captions.texts, images.captions.metadata, strict=True)
    # An image has no tokens, so its reward is a number.
    return [{"images": image, "prompts": text, "metadata": row, "length": 0} for image, text, row in rows]


def evaluation_rows(chunks: Iterable[Trajectories], kind: str) -> tuple[list[Row], list[Row]]:
    """Return the arguments of a reward function for each image, and its row in the table of samples.

    Args:
        chunks: The sampled images.
        kind: "pil" passes PIL images to the function, anything else tensors.
    """
    seen, shown = list[Row](), list[Row]()
    for images in chunks:
        seen += image_rows(images, kind)
        pairs = zip(images.captions.texts, as_pictures(images.images), strict=True)
        shown += [{"prompt": text, IMAGE: picture} for text, picture in pairs]
    return seen, shown


def show_evaluation(run: Run, rows: Sequence[Row]) -> Metrics:
    """Save and log the images of an evaluation, and return their metrics.

    Args:
        run: The run. The images go to images/step_<n>/ in its folder, and to its trackers.
        rows: The scored images of all processes.
    """
    step = run.progress.step
    show(run, EVALUATION, f"step_{step:0{len(str(run.config.train.total_steps))}d}", rows, step)
    return means(rows)


class ShownImages:
    """Collect the main process's first `SHOWN` images of a round, to save and log them.

    Args:
        run: The run.
        interval: Images are shown in every `interval`-th round; None never shows any.
    """

    def __init__(self, run: Run, interval: int | None) -> None:
        self.run = run
        self.round = run.progress.round + 1
        is_due = interval is not None and self.round % interval == 0
        self.left = SHOWN if is_due and run.world.main else 0
        self.rows: list[Row] = []

    def add(self, images: Trajectories, scores: Scores) -> None:
        """Add the next chunk of the round. Images beyond the first `SHOWN` are ignored."""
        pictures = as_pictures(images.images[: self.left])
        self.left -= len(pictures)
        for place, picture in enumerate(pictures):
            columns = reward_columns(scores.rewards, scores.components, place)
            self.rows.append({"prompt": images.captions.texts[place], **columns, IMAGE: picture})

    def log(self, advantages: Sequence[float | None]) -> None:
        """Save and log the collected images, under the step that comes next.

        Args:
            advantages: The advantage of each image of the round; None for an image that is not trained on.
        """
        for row, advantage in zip(self.rows, advantages, strict=False):
            row["advantage"] = advantage
        show(self.run, TRAINING, f"round_{self.round:05d}", self.rows, self.run.progress.step + 1)


def show(run: Run, table: str, name: str, rows: Sequence[Row], step: int) -> None:
    """Save images to the run folder and log them as a table. Only the main process acts.

    Args:
        run: The run.
        table: Name of the table.
        name: Each image goes to images/<name>/, and a grid of all to images/<name>.png.
        rows: The samples, each with a PIL image.
        step: The step that the table is logged under.
    """
    if run.tracker is None or not run.world.main or not rows:
        return
    run.folder.files.claim([FOLDER])
    directory, folder = run.folder.directory, Path(FOLDER) / name
    with writing(directory / folder):
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for place, row in enumerate(rows):
            picture = Picture(directory, (folder / f"{place:03d}.png").as_posix())
            row[IMAGE].save(picture.file)
            row[IMAGE] = picture
    together = (directory / folder).with_suffix(".png")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    all_of_them = table_grid(columns, [[row.get(name) for name in columns] for row in rows])
    assert all_of_them is not None
    with writing(together):
        all_of_them.save(together)
    logger.info("Images: %s", together)
    run.log_table(table, rows, step)
