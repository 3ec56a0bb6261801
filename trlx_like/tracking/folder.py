"""Reads the files of a run folder, as far as they can be read: a killed run leaves lines that are cut short."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trlx_like.redact import redacted


def read_row(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of a .jsonl file; None for a line that is cut short or otherwise not a row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, without lines that are not rows; none if it is missing."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [row for row in map(read_row, lines) if row is not None]


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, float]] | None]:
    """Yield the step and the numbers of each line of a metrics.jsonl, or None for a line that is not a row.

    Args:
        path: The file. If it does not exist, nothing is yielded.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            row = read_row(line)
            yield None if row is None else (row.pop("step"), dict(_numbers(row)))


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the values that are numbers, in any form that `tracking.values.plain` gives them; null is NaN."""
    for name, value in row.items():
        try:
            yield name, math.nan if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            continue


def read_config(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return config.yml without secrets, as text and as nested mappings; empty if it is missing or not YAML."""
    file = directory / "config.yml"
    text = redacted(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else ""
    try:
        config = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the one in C is 7 times as fast
    except yaml.YAMLError:
        config = None
    return text, config if isinstance(config, dict) else {}
