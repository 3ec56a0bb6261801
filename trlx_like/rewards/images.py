"""Reward functions for images that need no model: for first tries, for tests, and for DDPO's own task.

Use one as `reward_fn`, or in a YAML file as `data.reward_fn: trlx_like.rewards.images:jpeg_compressibility`. They need
PIL images (`method.image_type: pil`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

QUALITY = 95
"""Quality of the JPEG files, as in DDPO's own code."""


def jpeg_sizes(images: Sequence[Any], quality: int = QUALITY) -> list[float]:
    """Return the size of each image as a JPEG file, in kilobytes (1000 bytes)."""
    sizes = []
    for image in images:
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality)
        sizes.append(len(file.getvalue()) / 1000)
    return sizes


def jpeg_compressibility(images: Sequence[Any], **_: Any) -> list[float]:
    """Reward images with small JPEG files: minus the kilobytes.

    Source: Black et al. 2023, arXiv:2305.13301 (DDPO), sec. 5; ddpo-pytorch @1958463 `rewards.py`.
    """
    return [-size for size in jpeg_sizes(images)]


def jpeg_incompressibility(images: Sequence[Any], **_: Any) -> list[float]:
    """Reward images with large JPEG files: the kilobytes. Source: as `jpeg_compressibility`."""
    return jpeg_sizes(images)


def brightness(images: Sequence[Any], **_: Any) -> list[float]:
    """Reward bright images: the mean luminance, from 0 for black to 1 for white."""
    from PIL import ImageStat

    return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in images]
