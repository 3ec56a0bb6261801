"""Metric values and table cells in the forms that files, terminals and other people's trackers take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trlx_like.errors import RewardError


def number(name: str, value: Any) -> float:
    """A metric's value as a Python number: whatever `float()` takes. RewardError naming the metric otherwise."""
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"metric {name!r} must be one number, got {type(value).__name__}: {shorten(repr(value), 200)}."
        ) from error


def plain(value: Any) -> Any:
    """A value as JSON holds it. NaN and infinities become "NaN", "Infinity", "-Infinity", which `float()` reads back.

    0-d tensors and the like become numbers, and whatever JSON has no form for its `str`.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays
        return plain(value.tolist())
    return str(value)


def shorten(text: str, length: int) -> str:
    """The text on one line, at most `length` characters, the middle left out, safe to send to a terminal."""
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) <= length:
        return text
    end = (length - 5) // 2
    return f"{text[: length - 5 - end]} ... {text[len(text) - end :]}"


def compact(value: float) -> str:
    """A number in a few characters: 3 significant digits, integers as they are."""
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:.0f}"
    return f"{value:.3g}"
