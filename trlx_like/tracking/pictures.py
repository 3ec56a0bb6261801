"""Pictures of a run: as cells of tables, and as one image with all of them, each with its caption."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CELL = 128  # smaller images are enlarged to about this many pixels per side
LARGEST = 256  # larger images in a grid are reduced to this many pixels per side
LINE = 14  # the height of a line of text in pixels


class Picture(str):
    """A table cell that is a picture. As text it is the name of the file, for trackers that cannot show pictures.

    Args:
        directory: The run folder.
        name: The PNG file, relative to the run folder.
    """

    file: Path

    def __new__(cls, directory: Path, name: str) -> Picture:
        made = super().__new__(cls, name)
        made.file = directory / name
        return made


def smaller(content: bytes) -> bytes:
    """Reduce a picture to at most `CELL` pixels per side; both are the bytes of a PNG file."""
    from PIL import Image

    image, file = Image.open(io.BytesIO(content)), io.BytesIO()
    image.thumbnail((CELL, CELL))
    image.save(file, "PNG")
    return file.getvalue()


def table_grid(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any | None:
    """Join the pictures of a table to one PIL image, with prompts and rewards; return None if there are no pictures.

    Args:
        columns: The names of the columns.
        rows: The rows, whose cells may be a `Picture`.
    """
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


def grid(images: Sequence[Any], captions: Sequence[str], columns: int | None = None) -> Any:
    """Join PIL images to one image, in rows, each with its caption under it.

    Args:
        images: At least one image; all have the size of the first.
        captions: A text for each image, cut to its width. It may have several lines.
        columns: The number of images in a row; None: about as many as there are rows.

    Returns:
        A PIL image.
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
