"""Shared by the randomwalks programs: one run per graph or seed, and a table of optimality and CPU seconds."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from examples.problems import Draw, add_options, draws, summary

WALKS = 25  # walks from each of 20 nodes in an evaluation: the standard error of a trained model's mean is about .007


@dataclass
class Result:
    """Hold the mean optimality at each evaluation, and CPU seconds of this process by phase.

    more: further curves by name.
    """

    directory: Path
    curve: list[float]
    seconds: dict[str, float] = field(default_factory=dict)
    more: dict[str, list[float]] = field(default_factory=dict)


def measured(directory: Path, metric: str = "metrics/optimality") -> list[float]:
    """Read a metric at each evaluation of the run in a folder."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row[metric] for row in rows if metric in row]


class Stopwatch:
    """Measure the CPU seconds of this process between laps."""

    def __init__(self) -> None:
        self.began = time.process_time()

    def lap(self) -> float:
        before, self.began = self.began, time.process_time()
        return self.began - before


Run = Callable[[Draw], Result]


def main(doc: str | None, runs: Mapping[str, Run], directory: Path) -> None:
    """Run `--seeds` times, one after the other on one thread, and print a table.

    runs: What can be run, by name; the first is the default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1000, directory, "graph")
    parser.add_argument("what", nargs="?", choices=runs, default=next(iter(runs)), help="what to run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = draws(given)
    results = [runs[given.what](draw) for draw in drawn]
    print(f"\ngraph  seed  optimality at each evaluation{'':24}CPU seconds: {', '.join(results[0].seconds)}")
    for draw, result in zip(drawn, results, strict=True):
        seconds = "".join(f"{value:7.1f}" for value in result.seconds.values())
        print(f"{draw.problem:5}  {draw.seed}  {_line(result.curve):<56}{seconds}")
        for name, curve in result.more.items():
            print(f"{'':13}{_line(curve)}  {name}")
    print(f"at the end: {summary(drawn, [result.curve[-1] for result in results])}")
    last = results[0].directory
    print(f"\nrun folder: {last}\nreport:     {last / 'report.html'}")


def _line(curve: list[float]) -> str:
    before, *after = (f"{value:.3f}" for value in curve)
    return f"{before} -> {' '.join(after)}"
