"""Captioned emoji, and a model that learns to draw them.

The pictures are those of the npm package emoji-datasource 16.0.0 (itself MIT): Google's (Noto Emoji, Apache-2.0) and
Twitter's (Twemoji, CC-BY 4.0, which requires attribution when you show drawings of this model). The package also has
Apple's and Facebook's, which are not free and are not read. The archive is verified against its hash, and the pictures
below are kept in the cache of the examples.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from examples.assets import Package, cached, fetch_npm_archive
from examples.emoji import WORDS, new_pipeline
from examples.pictures import train_denoiser

PACKAGE = Package(
    name="emoji-datasource",
    version="16.0.0",
    member="package/emoji.json",
    integrity="sha512-/qHKqK5Nr3+8zhgO6kHmF43Fm5C8HNn0AaFRIpgw8HF3+uF0Vfc8jgLI1ZQS5ba1vBzksS8NBCjHejwLb2D/Sg==",
    instead="Pass --model FOLDER, an emoji model that was trained elsewhere.",
)
VENDORS = ("google", "twitter")
"""Vendors whose pictures are free."""
CATEGORIES = ("Smileys & Emotion", "Animals & Nature", "Food & Drink")
SIDE = 32  # pixels of a picture
PITCH = SIDE + 2  # distance between pictures on a sheet: each has a border of one pixel
STEPS = 5000
"""Number of training steps on 32 pictures each: 36 CPU minutes on one thread."""
DROPPED = 0.1
"""Fraction of captions that are dropped in training, as guidance needs it."""


@dataclass
class Emoji:
    """Hold pictures on white, and captions such as "google red apple"."""

    pictures: np.ndarray  # [N, 32, 32, 3] uint8
    captions: list[str]


def emoji() -> Emoji:
    """Return 918 emoji, from the package at the first call and then from the cache."""

    def make(path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            archive = Path(folder) / "archive.tgz"
            fetch_npm_archive(PACKAGE, archive)
            found = unpack(archive)
        with path.open("wb") as file:
            np.savez_compressed(file, pictures=found.pictures, captions=np.array(found.captions))

    with np.load(cached("emoji-v1.npz", make)) as file:
        return Emoji(file["pictures"], file["captions"].tolist())


def unpack(archive: Path) -> Emoji:
    """Read the free pictures of the package's archive."""
    with tarfile.open(archive) as tar:

        def member(name: str) -> Any:
            file = tar.extractfile(f"package/{name}")
            assert file is not None, f"{name} is a file"
            return file

        table = json.load(member("emoji.json"))
        sheets = {vendor: Image.open(member(f"img/{vendor}/sheets/32.png")).convert("RGBA") for vendor in VENDORS}
    found = [cut(sheet, table, vendor) for vendor, sheet in sheets.items()]
    return Emoji(np.concatenate([one.pictures for one in found]), [text for one in found for text in one.captions])


def cut(sheet: Image.Image, table: Sequence[dict[str, Any]], vendor: str) -> Emoji:
    """Cut a vendor's own pictures of the `CATEGORIES` out of its sheet (RGBA). table: rows of `emoji.json`."""
    pictures, captions = [], []
    for row in table:
        if row["category"] not in CATEGORIES or not row[f"has_img_{vendor}"]:
            continue
        left, top = (row[f"sheet_{axis}"] * PITCH + 1 for axis in "xy")
        picture = Image.new("RGBA", (SIDE, SIDE), "white")
        picture.alpha_composite(sheet.crop((left, top, left + SIDE, top + SIDE)))
        pictures.append(np.asarray(picture.convert("RGB")))
        words = re.findall("[a-z]+", (row["name"] or row["short_name"]).lower())
        captions.append(" ".join([vendor, *words][:WORDS]))
    return Emoji(np.stack(pictures), captions)


def train_base(folder: Path, seed: int = 1, steps: int = STEPS, data: Emoji | None = None) -> list[float]:
    """Train a new model to draw emoji, and save it to `folder`; return the loss of each step.

    Intermediate states are saved next to it, under a name that ends in ".part".
    """
    data = data or emoji()
    torch.manual_seed(seed)
    vocabulary = sorted({word for caption in data.captions for word in caption.split()})
    pipeline = new_pipeline(["<pad>", *vocabulary])
    pixels = torch.from_numpy(data.pictures).permute(0, 3, 1, 2) / 127.5 - 1  # [N, 3, 32, 32] in [-1, 1]
    numbers = pipeline.text_encoder.numbers(data.captions)  # [N, 8]

    def encode(rows: torch.Tensor) -> torch.Tensor:
        told = numbers[rows] * (torch.rand(len(rows), 1) >= DROPPED)
        found: torch.Tensor = pipeline.text_encoder(told)
        return found

    began, part = time.process_time(), folder.with_name(f"{folder.name}.part")

    def seen(losses: list[float]) -> None:
        if len(losses) % 100 == 0 or len(losses) == steps:
            mean, seconds = np.mean(losses[-100:]), time.process_time() - began
            pipeline.save_pretrained(part)
            print(f"base: step {len(losses)} of {steps}, loss {mean:.4f}, {seconds:.0f} CPU s", file=sys.stderr)

    latents = pipeline.vae.encode(pixels)
    losses = train_denoiser(pipeline, latents, encode, steps=steps, batch_size=32, rate=1e-3, seen=seen)
    part.rename(folder)
    return losses
