"""Turns samples.jsonl into the tables of the report, limited in size so that the page of a long run still opens."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from trlx_like.tracking.base import IMAGE
from trlx_like.tracking.folder import read_row
from trlx_like.tracking.pictures import smaller
from trlx_like.tracking.values import plain, spaced

PICTURES = 4_000_000  # the most bytes of pictures in the page
BUDGET = 1_500_000  # about the most bytes of rows in the page
LONGEST = 20_000  # longer texts are cut to this many characters
LARGEST = 20_000  # pictures of more bytes are replaced by a smaller copy

Index = dict[str, dict[int, list[tuple[int, int]]]]  # table -> step -> position and length of its lines in bytes


def read_tables(path: Path, pages: int = 1) -> tuple[list[dict[str, Any]], int]:
    """Read the tables of a samples.jsonl, as much as fits the page.

    If the file is too large, evenly spaced steps are kept, including the first and the last, and if necessary fewer
    rows of each. Cells of the column `IMAGE` become pictures, as many as fit.

    Args:
        path: The file; it may be missing.
        pages: The number of such files that share the page.

    Returns:
        A list of {"name", "columns", "evaluations", "steps": [{"step", "rows", "total"}]} and the number of lines that
        are not rows. "evaluations" and "total" count the steps and rows of the file. A row is a list of cells.
    """
    if not path.is_file():
        return [], 0
    index, torn = _index(path)
    with path.open("rb") as file:
        tables = [_table(file, name, steps, BUDGET // pages // len(index)) for name, steps in index.items()]
    _embed_pictures(tables, path.parent, PICTURES // pages)
    return tables, torn


def _index(path: Path) -> tuple[Index, int]:
    index: Index = {}
    torn = place = 0
    with path.open("rb") as file:
        for line in file:
            row = read_row(line)
            if row is None:
                torn += 1
            else:
                steps = index.setdefault(str(row.get("table")), {})
                steps.setdefault(row["step"], []).append((place, len(line)))
            place += len(line)
    return index, torn


def _table(file: Any, name: str, steps: dict[int, list[tuple[int, int]]], budget: int) -> dict[str, Any]:
    sizes = {step: sum(length for _, length in lines) for step, lines in steps.items()}
    kept, rows = _fitting(sorted(steps), sizes, budget)
    columns: dict[str, None] = {}
    chosen: list[tuple[int, list[dict[str, Any]]]] = []
    for step in kept:
        found = [_row(file, place) for place, _ in steps[step][: max(1, int(rows * len(steps[step])))]]
        columns.update(dict.fromkeys(column for row in found for column in row))
        chosen.append((step, found))
    return {
        "name": name,
        "columns": list(columns),
        "evaluations": len(steps),
        "steps": [
            {
                "step": step,
                "total": len(steps[step]),
                "rows": [[row.get(column) for column in columns] for row in found],
            }
            for step, found in chosen
        ],
    }


def _fitting(steps: list[int], sizes: dict[int, int], budget: int) -> tuple[list[int], float]:
    """Return the steps to keep, and the fraction of rows to keep of each."""
    total = sum(sizes.values())
    if total <= budget:
        return steps, 1.0
    many = max(min(len(steps), 8), int(budget / total * len(steps)))
    kept = spaced(steps, many)
    return kept, min(1.0, budget / sum(sizes[step] for step in kept))


def _row(file: Any, place: int) -> dict[str, Any]:
    file.seek(place)
    row = read_row(file.readline()) or {}
    return {name: _cell(value) for name, value in row.items() if name not in ("step", "table")}


def _cell(value: Any) -> Any:
    """Return numbers, booleans and None unchanged, and any other value as a text of limited length."""
    value = plain(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"{text[:LONGEST]} ... ({left_out} more characters in samples.jsonl)"


def _embed_pictures(tables: list[dict[str, Any]], folder: Path, left: int) -> None:
    """Replace names of pictures by the pictures, at most `left` bytes, starting with the last steps."""
    for table in tables:
        if IMAGE not in table["columns"]:
            continue
        column = table["columns"].index(IMAGE)
        for row in (row for step in reversed(table["steps"]) for row in step["rows"]):
            picture = _picture(folder, row[column])
            if picture is not None and len(picture) <= left:
                left -= len(picture)
                row[column] = picture


def _picture(folder: Path, name: Any) -> str | None:
    """Return a PNG file of the folder as a data URI; None if `name` is not one."""
    if not (isinstance(name, str) and name.endswith(".png")):
        return None
    file = (folder / name).resolve()
    if not (file.is_relative_to(folder.resolve()) and file.is_file()):
        return None
    content = file.read_bytes()
    if len(content) > LARGEST:
        content = smaller(content)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
