"""Tables and pictures of the runs of `benchmarks.learning`, for docs/results.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.learning.recipes import RECIPES
from benchmarks.side_by_side import ROOT

PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- learning beside the peers -->", "<!-- end of learning beside the peers -->"
GOOD = 0.95
METHODS = {"ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO"}
COLOURS = ("#0b6e99", "#c2571a", "#4a7a2c", "#7b4aa0")
"""Of our line, and of the peer's in the order of the recipes."""
WIDTH, HEIGHT, GAP = 330, 250, 22
LEFT, TOP, BOTTOM = 46, 30, 40
LINE = 17
"""Pixels of a line of the legend."""

Runs = Sequence[dict[str, Any]]


def of(runs: Runs, name: str) -> list[dict[str, Any]]:
    """Return the runs of a recipe, by graph."""
    return sorted((run for run in runs if run["recipe"] == name), key=lambda run: int(run["graph"]))


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return the lowest and the highest of values, or the value if they are written alike."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def table(runs: Runs) -> str:
    """Return two tables: what each line reached, and what it computed for that."""
    lines = [
        "| line | graphs | median | worst | at least .95 | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    work = [
        "| line | walks | their tokens | optimizer steps | tokens forward | tokens backward |",
        "|---|---|---|---|---|---|",
    ]
    labels = {"start": "the start: cloning of random walks", "filtered": "filtered cloning"}
    labels |= {name: f"{METHODS[recipe.method]}, {recipe.label}" for name, recipe in RECIPES.items()}
    for name, label in labels.items():
        if not (found := of(runs, name)):
            continue
        ends = [run["points"][-1] for run in found]
        reached = [end["optimality"] for end in ends]
        good = f"{sum(value >= GOOD for value in reached)} of {len(reached)}"
        seconds = spread([end["seconds"] for end in ends], "{:.0f}".format) if "seconds" in ends[0] else ""
        figures = f"**{statistics.median(reached):.3f}** | {min(reached):.3f} | {good} | {seconds}"
        lines.append(f"| {label} | {len(found)} | {figures} |")
        if "counts" in found[0]:
            names = ("walks", "walk tokens", "optimizer steps", "tokens forward", "tokens backward")
            counts = [spread([run["counts"][each] for run in found], "{:,.0f}".format) for each in names]
            work.append(f"| {label} | {' | '.join(counts)} |")
    return "\n".join([*lines, "", *work])


def draw(runs: Runs) -> None:
    """Write the pictures and the tables."""
    for axis, title in (("walks", "walks sampled and scored"), ("seconds", "CPU seconds of one thread")):
        (IMAGES / f"learning_{axis}.svg").write_text(picture(runs, axis, title), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    between = f"{BEGIN}\n{table(runs)}\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: between, text, flags=re.DOTALL), encoding="utf-8")


def picture(runs: Runs, axis: str, title: str) -> str:
    """Draw a panel for each method, with the median of all graphs and a band from the lowest to the highest.

    Args:
        runs: Finished runs.
        axis: The key of a point that is drawn to the right.
        title: What that is.
    """
    shown = {
        method: [name for name, recipe in RECIPES.items() if recipe.method == method and of(runs, name)]
        for method in METHODS
    }
    rows = max(len(names) for names in shown.values())
    width, height = GAP + len(METHODS) * (WIDTH + GAP), TOP + HEIGHT + BOTTOM + LINE * rows + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    far = max(point[axis] for names in shown.values() for name in names for point in middle(of(runs, name), axis))
    for number, (method, names) in enumerate(shown.items()):
        left = GAP + number * (WIDTH + GAP)
        parts.append(f'<g transform="translate({left},0)">')
        parts += panel(runs, METHODS[method], names, axis, far, title)
        parts.append("</g>")
    y = height - 12
    parts.append(
        f'<text x="{GAP + LEFT}" y="{y}" fill="#555">line: median of the graphs; band: lowest to highest; dashed: the '
        "start, which clones random walks; dotted: filtered cloning, both as medians; 1 is the shortest walk.</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def middle(runs: Runs, axis: str) -> list[dict[str, float]]:
    """Return the median, the lowest and the highest of runs at each evaluation."""
    points = []
    for together in zip(*(run["points"] for run in runs), strict=True):
        values = [point["optimality"] for point in together]
        place = statistics.median(point[axis] for point in together)
        points.append({axis: place, "low": min(values), "middle": statistics.median(values), "high": max(values)})
    return points


def panel(runs: Runs, name: str, names: Sequence[str], axis: str, far: float, title: str) -> list[str]:
    """Draw the curves of one method with axes and a legend below."""
    step = next(each for each in (10, 20, 50, 100, 200, 500, 1000, 2000) if far / each <= 5)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT) * value / far

    def y(value: float) -> float:
        return TOP + HEIGHT * (1.02 - value) / 1.02

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-size="14" font-weight="bold">{name}</text>']
    for tick in range(6):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(tick / 5):.1f}" y2="{y(tick / 5):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick / 5) + 4:.1f}" text-anchor="end">{tick / 5:.1f}</text>')
    for tick in range(int(far / step) + 1):
        place = f"{x(tick * step):.1f}"
        parts.append(f'<text x="{place}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick * step:,}</text>')
    for kind, dashes in (("start", "7 4"), ("filtered", "2 3")):
        if found := of(runs, kind):
            at = y(statistics.median(run["points"][-1]["optimality"] for run in found))
            place = f'x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"'
            parts.append(f'<line {place} stroke="#777" stroke-dasharray="{dashes}"/>')
    curves = [(middle(of(runs, each), axis), COLOURS[at]) for at, each in enumerate(names)]
    for points, colour in curves:
        edge = [(point[axis], point["high"]) for point in points]
        edge += [(point[axis], point["low"]) for point in reversed(points)]
        around = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edge)
        parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.13"/>')
    for points, colour in reversed(curves):  # ours is on top
        line = " ".join(f"{x(point[axis]):.1f},{y(point['middle']):.1f}" for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    below = TOP + HEIGHT + 34
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{below}" text-anchor="middle" fill="#555">{title}</text>')
    for at, each in enumerate(names):
        low = below + LINE * (at + 1)
        count = len(of(runs, each))
        label = f"{RECIPES[each].label} ({count} graph{'s' if count > 1 else ''})"
        parts.append(f'<rect x="{LEFT}" y="{low - 8}" width="18" height="4" fill="{COLOURS[at]}"/>')
        parts.append(f'<text x="{LEFT + 25}" y="{low}">{label}</text>')
    return parts
