"""Draws a metric of several runs as one SVG: the pictures of the README.

python scripts/learning_curve.py metrics/optimality docs/images/randomwalks.svg runs/randomwalks/seed*/ppo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
COLOURS = ("#0b6e99", "#c2571a", "#4a7a2c", "#7b4aa0", "#a3243b")


def curve(run: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) pairs of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row[metric]) for row in rows if metric in row]


def picture(curves: list[list[tuple[int, float]]], metric: str) -> str:
    """One line a run, axes with five ticks, and the range of the last values."""
    steps = [step for points in curves for step, _ in points]
    values = [value for points in curves for _, value in points]
    low, high = min(0.0, *values), max(1.0, *values)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(5):
        value, step = low + (high - low) * tick / 4, max(steps) * tick / 4
        _, y = at(0, value)
        x, bottom = at(step, low)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{step:.0f}</text>')
    for number, points in enumerate(curves):
        line = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    last = [points[-1][1] for points in curves]
    title = f"{metric}: {len(curves)} seeds, at the end {min(last):.3f} to {max(last):.3f}"
    parts.append(f'<text x="{LEFT}" y="20" font-size="14">{title}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimiser steps</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metric", help="name of the metric")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    given = parser.parse_args()
    svg = picture([curve(run, given.metric) for run in given.runs], given.metric)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
