"""Images of a run as cells of tables, and as one picture with all of them, each with its text under it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CELL = 128  # pixels that an image is enlarged to, if it is smaller
LARGEST = 256  # pixels that an image of a grid is made smaller to
LINE = 14  # pixels of a line of text


class Picture(str):
    """A cell of a table that is a picture: the name of its PNG file in the run folder.

    Trackers that cannot show pictures show the name.
    """

    file: Path

    def __new__(cls, directory: Path, name: str) -> Picture:
        made = super().__new__(cls, name)
        made.file = directory / name
        return made


def smaller(content: bytes) -> bytes:
    """A PNG file as one of at most 128 pixels a side."""
    from PIL import Image

    image, file = Image.open(io.BytesIO(content)), io.BytesIO()
    image.thumbnail((CELL, CELL))
    image.save(file, "PNG")
    return file.getvalue()


def table_grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any | None:
    """The pictures of a table, each with its prompt and reward, as one PIL image; None if it has no pictures."""
    from PIL import Image

    pictures, captions = [], []
    for row in rows:
        for picture in [cell for cell in row if isinstance(cell, Picture)]:
            with Image.open(picture.file) as image:
                image.load()
            cells = dict(zip(columns, row, strict=True))
            reward = cells.get("reward")
            pictures.append(image)
            captions.append(f"{cells.get('prompt', '')}\n{'' if reward is None else format(reward, '.4g')}")
    return grid(pictures, captions) if pictures else None


def write_grid(images: Sequence[Any], captions: Sequence[str], path: Path, columns: int | None = None) -> None:
    """`grid` as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(images, captions, columns).save(path)


def grid(images: Sequence[Any], captions: Sequence[str], columns: int | None = None) -> Any:
    """PIL images of one size in rows, with their captions (several lines if they have line breaks), as one image.

    columns: images in a row; None: as many as there are rows.
    """
    from PIL import Image, ImageDraw

    width, height = images[0].size
    longest = max(width, height)
    factor = max(1, CELL // longest) if longest <= LARGEST else LARGEST / longest
    width, height = max(1, int(width * factor)), max(1, int(height * factor))
    how = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS
    lines = max(caption.count("\n") + 1 for caption in captions)
    columns = columns or math.ceil(math.sqrt(len(images)))
    cell = (width + 8, height + lines * LINE + 8)
    page = Image.new("RGB", (columns * cell[0], math.ceil(len(images) / columns) * cell[1]), "white")
    draw = ImageDraw.Draw(page)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * cell[0] + 4, place // columns * cell[1] + 4
        page.paste(image.convert("RGB").resize((width, height), how), (left, top))
        letters = max(4, width // 6)
        draw.text((left, top + height + 1), "\n".join(line[:letters] for line in caption.split("\n")), fill="black")
    return page
