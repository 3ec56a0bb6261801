"""Rewards of images that need no model."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from trlx_like.rewards.images import brightness, jpeg_compressibility, jpeg_incompressibility, jpeg_sizes


def picture(level: float, noise: float = 0.0) -> Image.Image:
    values = level + noise * np.random.default_rng(0).standard_normal((32, 32, 3))
    return Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8))


def test_jpeg() -> None:
    plain, noisy = picture(0.5), picture(0.5, 0.2)
    file = io.BytesIO()
    noisy.save(file, "JPEG", quality=95)
    assert jpeg_sizes([noisy]) == [len(file.getvalue()) / 1000]
    small, large = jpeg_sizes([plain, noisy])
    assert small < 0.8 < 1.5 < large
    assert jpeg_sizes([noisy], quality=50)[0] < large
    assert jpeg_compressibility([plain, noisy], prompts=["a", "b"]) == [-small, -large]
    assert jpeg_incompressibility([plain, noisy], prompts=["a", "b"]) == [small, large]


def test_brightness() -> None:
    # Luminance of pure green is 0.587 of white: 149.685 of 255, 150 as a whole number.
    green = Image.new("RGB", (4, 4), (0, 255, 0))
    half = Image.fromarray(np.repeat(np.array([[0, 255]], dtype=np.uint8), 4, axis=0))
    assert brightness([green, half, picture(1.0), picture(0.0)], prompts=[]) == pytest.approx([150 / 255, 0.5, 1, 0])
