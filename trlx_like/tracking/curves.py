"""metrics.jsonl as the charts of the report: thinned series, their extremes, and which belong together.

Extremes and counts are of all rows; only what is drawn is thinned.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trlx_like.tracking.folder import read_metrics

ELAPSED = "time/elapsed"
BUCKETS = 300  # a series is drawn by the lowest and highest value of each

# The sections of the page: a title and the pattern of the metrics in it. The first that matches takes a metric.
GROUPS = {
    "Reward and metrics": r"rewards?/|metrics/",
    "KL and entropy": r"(.*[/_])?(sqrt_|approx_)?kl(_|$)|.*entropy",
    "Losses and clipping": r"loss(es)?(/|$)|.*clip|(.*[/_])?ratio(_|$)",
    "Values": r"((old_)?values|returns|advantages|qvalues|awac_weight)/",
    "Rollouts": r"rollout|generation/",
    "Time": r"time/",
}
REST = "Everything else"
# KL and reward of reward against KL: of each, the first that a run logs. All are of the policy that made the round.
FRONTIER = (("policy/kl", "losses/kl"), ("rollout/score_mean", "reward/mean"))
POINTS = 400
# Inside a section: what comes before the others, in this order.
FIRST = ["reward/mean", "metrics/", "reward/", "policy/kl_per_token", "losses/total", "rollout/score", "values/mean"]


@dataclass
class Curve:
    """One metric over the run."""

    name: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def summary(self) -> dict[str, Any] | None:
        """First, last, lowest and highest value with their steps, the thinned points and their means, and how many
        values are not finite.

        None if no value is finite. A point that is not finite is a gap: None.
        """
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        if np.any(np.diff(steps) < 0):
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            return None
        marks = {
            "first": finite[0],
            "last": finite[-1],
            "min": finite[np.argmin(values[finite])],
            "max": finite[np.argmax(values[finite])],
        }
        points, means = _thinned(values)
        return {
            "name": self.name,
            **{name: {"step": int(steps[at]), "value": _short(values[at])} for name, at in marks.items()},
            "count": len(values),
            "bad": len(values) - len(finite),
            "steps": steps[points].tolist(),
            "values": [_short(value) for value in values[points]],
            "mean_steps": [int(steps[middle]) for middle in means],
            "means": [_short(mean) for mean in means.values()],
        }


def _thinned(values: np.ndarray[Any, Any]) -> tuple[list[int], dict[int, float]]:
    """Positions to draw: all of a short series, else of each bucket its lowest and highest, and both ends.

    Also the mean of each bucket by the position of its middle; none of a short series.
    """
    if len(values) <= 2 * BUCKETS:
        return list(range(len(values))), {}
    edges = np.linspace(0, len(values), BUCKETS + 1).astype(int)
    kept, means = {0, len(values) - 1}, {}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        finite = start + np.flatnonzero(np.isfinite(values[start:end]))
        means[(start + end) // 2] = float(np.mean(values[finite])) if len(finite) else math.nan
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
        else:
            kept.add(start)
    return sorted(kept), means


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_curves(path: Path) -> tuple[dict[str, Curve], int]:
    """Read the metrics of a metrics.jsonl.

    Args:
        path: The file; it may be missing.

    Returns:
        The curves by the name of their metric, and the number of lines that are not rows.
    """
    curves: dict[str, Curve] = {}
    torn = 0
    for row in read_metrics(path):
        if row is None:
            torn += 1
            continue
        for name, value in row[1].items():
            curve = curves.setdefault(name, Curve(name))
            curve.steps.append(row[0])
            curve.values.append(value)
    return curves, torn


def charts(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """The sections of the page in order: {"title", "folded", "charts": [{"title", "series"}]}.

    The variants of a sweep (`reward/mean@temperature=0.7`) share a chart, and so do the phases of time.
    """
    members: defaultdict[str, defaultdict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(set(curves) - {ELAPSED}, key=_rank):
        summary = curves[name].summary()
        if summary is not None:
            title, _, variant = name.partition("@")
            group = next((group for group, pattern in GROUPS.items() if re.match(pattern, name)), REST)
            if group == "Time":
                title, variant = "seconds a step, by phase", name.removeprefix("time/")
            members[group][title].append({"label": variant or name, **summary})
    longest_first = {phase["name"]: -phase["seconds"] for phase in phases(curves)}
    for lines in members["Time"].values():  # as in the summary beside it
        lines.sort(key=lambda one: longest_first.get(one["label"], 0.0))
    return [
        {
            "title": group,
            "folded": group == REST,
            "charts": [{"title": title, "series": series} for title, series in members[group].items()],
        }
        for group in [*GROUPS, REST]
        if members[group]
    ]


def frontier(curves: dict[str, Curve]) -> dict[str, Any] | None:
    """What the reward cost: {"kl", "reward": names of metrics, "steps", "x", "y"}, a point a step that has both.

    None for fewer than two points. Of more than `POINTS` there are so many, evenly spaced, both ends among them.
    """
    kl, reward = (next((curves[name] for name in names if name in curves), None) for names in FRONTIER)
    if kl is None or reward is None:
        return None
    distances = {step: value for step, value in zip(kl.steps, kl.values, strict=True) if math.isfinite(value)}
    rewards = {step: value for step, value in zip(reward.steps, reward.values, strict=True) if math.isfinite(value)}
    steps = sorted(set(distances) & set(rewards))
    if len(steps) < 2:
        return None
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), POINTS)).round().astype(int))
    steps = [steps[place] for place in places]
    columns = {"x": [_short(distances[step]) for step in steps], "y": [_short(rewards[step]) for step in steps]}
    return {"kl": kl.name, "reward": reward.name, "steps": steps, **columns}


def _rank(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sorts what leads its section first, then by name, with numbers in names by their size."""
    place = next((place for place, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))
    return place, [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def phases(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """Where the time went: the seconds of each phase over the whole run, most first, and of all else."""
    seconds = {
        name.removeprefix("time/"): float(np.nansum(curve.values))
        for name, curve in curves.items()
        if name.startswith("time/") and name != ELAPSED
    }
    total = duration(curves)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    if seconds and total is not None and total > sum(seconds.values()):
        ordered.append(("other", total - sum(seconds.values())))
    return [{"name": name, "seconds": round(value, 3)} for name, value in ordered if math.isfinite(value)]


def duration(curves: dict[str, Curve]) -> float | None:
    """Seconds that the run took, pauses left out; None if the file does not say."""
    summary = curves[ELAPSED].summary() if ELAPSED in curves else None
    return summary["last"]["value"] if summary else None


def goals(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """What the run was for, at most three: reward, then metrics; without any, the score or loss of training.

    Of a sweep the variant with the highest value. `lower`: less is better.
    """
    best: dict[str, dict[str, Any]] = {}
    for name in sorted(curves, key=_rank):
        if not name.startswith(("reward/mean", "metrics/")):
            continue
        summary, base = curves[name].summary(), name.partition("@")[0]
        if summary and (base not in best or summary["max"]["value"] > best[base]["max"]["value"]):
            best[base] = summary
    chosen = list(best.values())[:3]
    for name in ("rollout/score_mean", "losses/total_loss", "losses/loss"):
        summary = curves[name].summary() if name in curves and not chosen else None
        chosen += [summary] if summary else []
    return [
        {
            "name": goal["name"],
            "lower": goal["name"].startswith("losses/"),
            **{key: goal[key] for key in ("first", "last", "min", "max")},
        }
        for goal in chosen
    ]
