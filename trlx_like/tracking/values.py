"""Converts metric values and table cells to the forms that files, terminals and other trackers accept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trlx_like.errors import RewardError

T = TypeVar("T")


def number(name: str, value: Any) -> float:
    """Return the value of a metric as a Python number.

    Raises:
        RewardError: `float()` does not accept the value; the message names the metric.
    """
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"metric {name!r} must be one number, got {type(value).__name__}: {shorten(repr(value), 200)}."
        ) from error


def plain(value: Any) -> Any:
    """Convert a value to what JSON supports.

    Tensors and arrays become numbers or lists. NaN and infinities become "NaN", "Infinity" and "-Infinity", which
    `float()` reads back. Any other value that JSON does not support becomes its `str`.
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


def spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` evenly spaced items, including the first and the last."""
    last = len(items) - 1
    return list(items) if last < count else [items[round(place * last / (count - 1))] for place in range(count)]


def shorten(text: str, length: int) -> str:
    """Put a text on one line of at most `length` characters, without its middle and without control characters."""
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    if len(text) <= length:
        return text
    end = (length - 5) // 2
    return f"{text[: length - 5 - end]} ... {text[len(text) - end :]}"


def compact(value: float) -> str:
    """Format a number in a few characters: 3 significant digits, or all digits of an integer."""
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:.0f}"
    return f"{value:.3g}"
