"""Makes one page of several runs: their curves over each other, what differs in their configurations, their samples.

Runs that differ only in their seed are one group, drawn as a median in a band from the lowest to the highest run.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trlx_like.config.yaml_source import as_yaml
from trlx_like.errors import DataError
from trlx_like.tracking.base import IMAGE
from trlx_like.tracking.curves import ELAPSED, Curve, goals, last, rank, read_curves, sections
from trlx_like.tracking.folder import read_config
from trlx_like.tracking.report import write_page
from trlx_like.tracking.tables import read_tables

SAME = {
    f"train.{name}"
    for name in (
        *("seed", "checkpoint_dir", "logging_dir", "rollout_logging_dir", "run_name", "group_name", "tags"),
        *("resume_from_checkpoint", "force_resume"),
    )
}
"""Options in which the runs of a group may differ: the seed, and where a run is written or how it is called."""
NAMED = 3
"""Groups are labelled with the options in which they differ if these are at most so many, else with a run."""


@dataclass
class Read:
    """Hold what the page needs of a run: its options by dotted name, its curves and its tables."""

    name: str
    options: dict[str, Any]
    curves: dict[str, Curve]
    tables: list[dict[str, Any]]


@dataclass
class Group:
    """Hold runs that differ only in their seed."""

    label: str
    runs: list[Read]

    def series(self, metric: str) -> dict[str, Any] | None:
        """Return the curve of a metric for the page: the median over the runs at each step, with the extremes.

        A step counts the runs that have a finite value at it.
        """
        curves = [run.curves[metric] for run in self.runs if metric in run.curves]
        found = [summary for curve in curves if (summary := curve.summary()) is not None]
        if len(found) < 2:
            return {"label": self.label, **found[0]} if found else None
        at: dict[int, list[float]] = {}
        for curve in curves:
            for step, value in dict(zip(curve.steps, curve.values, strict=True)).items():
                at.setdefault(step, []).append(value)
        finite = {step: [value for value in at[step] if abs(value) < float("inf")] for step in sorted(at)}
        middle = [median(values) if values else float("nan") for values in finite.values()]
        made = Curve(metric, array("q", finite), array("d", middle)).summary()
        assert made is not None  # two of the curves have finite values
        made["min"] = min((one["min"] for one in found), key=lambda mark: float(mark["value"]))
        made["max"] = max((one["max"] for one in found), key=lambda mark: float(mark["value"]))
        made["bad"] = sum(one["bad"] for one in found)
        low, high = ([best(finite[step], default=None) for step in made["steps"]] for best in (min, max))
        return {"label": self.label, **made, "low": low, "high": high}


def write_comparison(runs: Sequence[Path], file: Path, kind: str = "comparison", **more: Any) -> Path:
    """Write a page that compares runs.

    Args:
        runs: Run folders.
        file: The page.
        kind: What it shows, above its title.
        more: Further data for the script of the page; `name` is its title.

    Returns:
        The file.

    Raises:
        DataError: A folder is not one of a run, or `file` is something else than such a page.
    """
    if file.exists() and b'content="trlx_like"' not in (file.read_bytes()[:600] if file.is_file() else b""):
        raise DataError(f"{file} is not a page of trlx_like, so it is not replaced. Choose another file.")
    read = _read(runs)
    groups = _groups(read)
    shared = {
        name: value
        for name, value in read[0].options.items()
        if name not in SAME and all(name in run.options and run.options[name] == value for run in read)
    }
    data = {
        "command": "trlx-like compare RUN RUN",
        "groups": sections(_series(groups)),
        "tables": _side_by_side(groups),
        "compared": {
            "groups": [{"label": group.label, "runs": [run.name for run in group.runs]} for group in groups],
            "results": _results(groups),
            "options": _differences(groups),
        },
        **more,
    }
    name = data.pop("name", f"{len(read)} runs")
    return write_page(file, kind, name, as_yaml(shared) if shared else "", data)


def _read(folders: Sequence[Path]) -> list[Read]:
    whole = list(dict.fromkeys(folder.resolve() for folder in folders))
    for folder in whole:
        if not (folder / "metrics.jsonl").is_file():
            raise DataError(f"{folder} is not a run folder: it has no metrics.jsonl.")
    above = os.path.commonpath([folder.parent for folder in whole])
    return [
        Read(
            folder.relative_to(above).as_posix(),
            dict(_dotted(read_config(folder)[1])),
            read_curves(folder / "metrics.jsonl")[0],
            read_tables(folder / "samples.jsonl", len(whole))[0],
        )
        for folder in whole
    ]


def _dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _groups(runs: Sequence[Read]) -> list[Group]:
    """Put runs that differ only in `SAME` together, and label each group."""
    members: dict[str, list[Read]] = {}
    for run in runs:
        options = {name: value for name, value in run.options.items() if name not in SAME}
        key = json.dumps(options, sort_keys=True, default=str) if options else run.name
        members.setdefault(key, []).append(run)
    groups = [Group("", members[key]) for key in members]
    differing = [row for row in _differences(groups) if row["name"] not in SAME]
    for place, group in enumerate(groups):
        words = [f"{row['name'].rpartition('.')[2]}={_short(row['cells'][place])}" for row in differing]
        group.label = ", ".join(words) if 0 < len(words) <= NAMED else group.runs[0].name
    if len(groups) == 1 and len(runs) > 1:
        groups[0].label = f"{len(runs)} seeds"
    if len({group.label for group in groups}) < len(groups):
        for group in groups:
            group.label = group.runs[0].name
    return groups


def _short(text: str | None) -> str:
    """Return a value for a label, numbers with at most four digits."""
    try:
        return f"{float(text or ''):.4g}"
    except ValueError:
        return text or "none"


def _differences(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the options that differ: {"name", "cells": a text for each group, or None without the option}."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.options)
    rows = []
    for name in names:
        cells = [_spelled(run.options[name] for run in group.runs if name in run.options) for group in groups]
        if name == "train.seed" or (name not in SAME and len(set(cells)) > 1):
            rows.append({"name": name, "cells": cells})
    return rows


def _spelled(values: Iterable[Any]) -> str | None:
    """Write different values of an option, or None if there is none."""
    texts = (value if isinstance(value, str) else json.dumps(value, default=str) for value in values)
    return ", ".join(dict.fromkeys(texts)) or None


def _series(groups: Sequence[Group]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {name for group in groups for run in group.runs for name in run.curves} - {ELAPSED}
    for name in sorted(names, key=rank):
        for color, group in enumerate(groups):
            if (series := group.series(name)) is not None:
                yield name, {**series, "color": color}


def _results(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return for each goal of the first run its last value in each group: median, lowest and highest over runs."""
    rows = []
    for goal in goals(groups[0].runs[0].curves):
        cells = []
        for group in groups:
            values = [value for run in group.runs if (value := last(run.curves, goal["name"])) is not None]
            cells.append({"value": median(values), "low": min(values), "high": max(values)} if values else None)
        rows.append({"name": goal["name"], "cells": cells})
    return rows


def _side_by_side(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the samples of evaluations as one table: a row for each prompt, with columns for each group.

    A group shows its first run; if there is only one group, each of its runs has columns. Steps that only one of them
    has are left out.
    """
    one = groups[0].runs if len(groups) == 1 else ()
    shown = [(run.name, run) for run in one] or [(group.label, group.runs[0]) for group in groups]
    parts = {label: found for label, run in shown if (found := dict(_answers(run.tables)))}
    steps = sorted({step for label in parts for step in parts[label]})
    steps = [step for step in steps if sum(step in found for found in parts.values()) > 1]
    swept = any(key[0] for found in parts.values() for keys in found.values() for key in keys)
    first = 0 if swept else 1
    made = []
    for step in steps:
        keys = dict.fromkeys(key for found in parts.values() for key in found.get(step, ()))
        nothing = (None, None)
        cells = [[cell for found in parts.values() for cell in found.get(step, {}).get(key, nothing)] for key in keys]
        rows = [[*key[:2], *row][first:] for key, row in zip(keys, cells, strict=True)]
        made.append({"step": step, "rows": rows, "total": len(rows)})
    columns = [*["setting", "prompt"][first:], *(f"{label}/{name}" for label in parts for name in ("output", "reward"))]
    return [{"name": "samples", "columns": columns, "evaluations": len(steps), "steps": made}] if made else []


def _answers(tables: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[tuple[Any, ...], tuple[Any, Any]]]]:
    """Yield each step with its samples: setting, prompt and repetition -> output (or picture) and reward."""
    for table in tables:
        if table["name"] != "samples" or "prompt" not in table["columns"]:
            continue
        for step in table["steps"]:
            found: dict[tuple[Any, ...], tuple[Any, Any]] = {}
            for row in (dict(zip(table["columns"], cells, strict=True)) for cells in step["rows"]):
                repetition = 0
                while (key := (row.get("sweep"), row["prompt"], repetition)) in found:
                    repetition += 1
                found[key] = (row.get("output", row.get(IMAGE)), row.get("reward"))
            yield step["step"], found
