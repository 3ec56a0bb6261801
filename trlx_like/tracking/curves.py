"""Turns metrics.jsonl into the charts of the report: thinned curves with their extremes, in sections.

Extremes and counts are taken over all rows; only the points that are drawn are thinned.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trlx_like.tracking.folder import read_metrics
from trlx_like.tracking.values import spaced

ELAPSED = "time/elapsed"
BUCKETS = 300  # of a long curve, the lowest and the highest value of each bucket are drawn

PHASES = "seconds per step, by phase"
# The sections of the page: a title and the pattern of the charts in it. The first that matches takes a chart.
GROUPS = {
    "Reward and metrics": r"rewards?/|metrics/",
    "KL and entropy": r"(.*[/_])?(sqrt_|approx_)?kl(_|$)|.*entropy",
    "Losses and clipping": r"loss(es)?(/|$)|perplexity|.*clip|(.*[/_])?ratio(_|$)",
    "Values": r"((old_)?values|returns|advantages|qvalues|awac_weight)/",
    "Rollouts": r"rollout|generation/|pool/",
    "Time": PHASES,
}
REST = "Everything else"
# Metrics that share the chart of another metric: how their names start, the start of the other's, and their label.
SHARED = (("eval/", "", "held out"), ("rollout/kept/", "rollout/", "kept"))
# The KL and the reward of the chart "reward against KL": of each, the first metric that the run logs.
FRONTIER = (("policy/kl", "losses/kl"), ("rollout/score_mean", "reward/mean"))
POINTS = 400
# The goal of a run that evaluates no reward: the first of these that is logged.
FALLBACKS = ("rollout/score_mean", "eval/rewards/accuracies", "rewards/accuracies", "losses/total_loss", "losses/loss")
# The metrics that come first in their section, in this order.
FIRST = ["reward/mean", "metrics/", "reward/", "policy/kl_per_token", "losses/total", "rollout/score", "values/mean"]


@dataclass
class Curve:
    """Hold the values of one metric over the run."""

    name: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def summary(self) -> dict[str, Any] | None:
        """Return what the page shows of the curve; None if no value is finite.

        Returns:
            "first", "last", "min" and "max" with "step" and "value"; "count" of all values and "bad" of those that are
            not finite; "steps" and "values" to draw, where None is a gap; "mean_steps" and "means" of long curves.
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
    """Return the positions of the points to draw, and the mean of each bucket by the position of its middle.

    A short curve is drawn whole and has no buckets; of a long one, both ends and the extremes of each bucket are drawn.
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


def read_curves(path: Path, last_step: float = math.inf) -> tuple[dict[str, Curve], int]:
    """Read the metrics of a metrics.jsonl.

    Args:
        path: The file; it may be missing.
        last_step: Ignore what was logged after this step.

    Returns:
        The curves by the name of their metric, and the number of lines that are not rows.
    """
    curves: dict[str, Curve] = {}
    torn = 0
    for row in read_metrics(path):
        if row is None:
            torn += 1
            continue
        for name, value in row[1].items() if row[0] <= last_step else ():
            curve = curves.setdefault(name, Curve(name))
            curve.steps.append(row[0])
            curve.values.append(value)
    return curves, torn


def charts(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """Return the sections of the page in order: {"title", "folded", "charts": [{"title", "series"}]}.

    These share a chart: the values of a sweep (`reward/mean@temperature=0.7`); the phases of time; training and
    held-out data (`eval/`); all samples of a round and those that are learned from (`rollout/kept/`).
    """
    seconds = {f"time/{phase['name']}": phase["seconds"] for phase in phases(curves)}

    def order(name: str) -> tuple[Any, ...]:
        title, label = _chart(name, curves)
        return rank(title), label in ("held out", "kept"), -seconds.get(name, 0.0), rank(name)

    found = [
        (title, {"label": label, **summary})
        for name in sorted(set(curves) - {ELAPSED}, key=order)
        for title, label in [_chart(name, curves)]
        if (summary := curves[name].summary()) is not None
    ]
    return sections(found)


def sections(found: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Sort series into charts by the titles that they come with, and the charts into the sections of the page.

    Args:
        found: The title of the chart of each series, and the series, in the order of the page.

    Returns:
        As `charts`.
    """
    members: defaultdict[str, defaultdict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for title, series in found:
        group = next((group for group, pattern in GROUPS.items() if re.match(pattern, title)), REST)
        members[group][title].append(series)
    return [
        {
            "title": group,
            "folded": group == REST,
            "charts": [{"title": title, "series": series} for title, series in members[group].items()],
        }
        for group in [*GROUPS, REST]
        if members[group]
    ]


def _chart(name: str, curves: dict[str, Curve]) -> tuple[str, str]:
    """Return the title of the chart that a metric is drawn in, and its label there."""
    if name.startswith("time/"):
        return PHASES, name.removeprefix("time/")
    for start, other, label in SHARED:
        shared = other + name.removeprefix(start)
        if name.startswith(start) and shared in curves:
            return shared, label
    title, _, variant = name.partition("@")
    return title, variant or name


def frontier(curves: dict[str, Curve]) -> dict[str, Any] | None:
    """Return the points of "reward against KL": {"kl", "reward": names of the metrics, "steps", "x", "y"}.

    There is a point for each step that has both, or `POINTS` evenly spaced ones if there are more. None for fewer than
    two points.
    """
    kl, reward = (next((curves[name] for name in names if name in curves), None) for names in FRONTIER)
    if kl is None or reward is None:
        return None
    x, y = (
        {step: _short(value) for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)}
        for curve in (kl, reward)
    )
    steps = spaced(sorted(x.keys() & y.keys()), POINTS)
    if len(steps) < 2:
        return None
    points = {"steps": steps, "x": [x[step] for step in steps], "y": [y[step] for step in steps]}
    return {"kl": kl.name, "reward": reward.name, **points}


def rank(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key: the metrics of `FIRST`, then the others by name, with numbers in names by their size."""
    place = next((place for place, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))
    return place, [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def phases(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """Return the seconds of each phase over the whole run, longest first, and of everything else ("other")."""
    seconds = {
        name.removeprefix("time/"): float(np.nansum(curve.values))
        for name, curve in curves.items()
        if name.startswith("time/") and name != ELAPSED
    }
    total = last(curves, ELAPSED)
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    if seconds and total is not None and total > sum(seconds.values()):
        ordered.append(("other", total - sum(seconds.values())))
    return [{"name": name, "seconds": round(value, 3)} for name, value in ordered if math.isfinite(value)]


def last(curves: dict[str, Curve], metric: str) -> float | None:
    """Return the last finite value of a metric; None if there is none."""
    summary = curves[metric].summary() if metric in curves else None
    return summary["last"]["value"] if summary else None


def goals(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """Choose at most three metrics by which to judge the run.

    They are the reward and the metrics of evaluations, or without any the first training metric of `FALLBACKS`. Of a
    sweep the variant with the highest value is taken.

    Returns:
        The summary of each metric's curve; "lower" tells whether lower values are better.
    """
    best: dict[str, dict[str, Any]] = {}
    for name in sorted(curves, key=rank):
        if not name.startswith(("reward/mean", "metrics/")):
            continue
        summary, base = curves[name].summary(), name.partition("@")[0]
        if summary and (base not in best or summary["max"]["value"] > best[base]["max"]["value"]):
            best[base] = summary
    chosen = list(best.values())[:3]
    for name in FALLBACKS:
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
