"""Images of a run as files: one picture with all of them, each with a line of text under it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CELL = 128  # pixels that an image is enlarged to, if it is smaller
LINE = 14  # pixels of a line of text


def smaller(content: bytes) -> bytes:
    """A PNG file as one of at most 128 pixels a side."""
    from PIL import Image

    image, file = Image.open(io.BytesIO(content)), io.BytesIO()
    image.thumbnail((CELL, CELL))
    image.save(file, "PNG")
    return file.getvalue()


def write_grid(images: Sequence[Any], captions: Sequence[str], path: Path, columns: int | None = None) -> None:
    """PIL images of one size in rows, with their captions (several lines if they have line breaks).

    columns: images in a row; None: as many as there are rows.
    """
    from PIL import Image, ImageDraw

    width, height = images[0].size
    factor = max(1, CELL // max(width, height))
    width, height = width * factor, height * factor
    lines = max(caption.count("\n") + 1 for caption in captions)
    columns = columns or math.ceil(math.sqrt(len(images)))
    cell = (width + 8, height + lines * LINE + 8)
    page = Image.new("RGB", (columns * cell[0], math.ceil(len(images) / columns) * cell[1]), "white")
    draw = ImageDraw.Draw(page)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * cell[0] + 4, place // columns * cell[1] + 4
        page.paste(image.convert("RGB").resize((width, height), Image.Resampling.NEAREST), (left, top))
        letters = max(4, width // 6)
        draw.text((left, top + height + 1), "\n".join(line[:letters] for line in caption.split("\n")), fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
