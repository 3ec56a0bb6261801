"""Shared by the randomwalks programs: one run per seed, and a table of optimality and CPU seconds."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

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


Run = Callable[[int, Path], Result]


def main(doc: str | None, run: Run, directory: Path = Path("runs/randomwalks"), alone: Run | None = None) -> None:
    """Run `--seeds` times, one after the other on one thread, and print a table. alone: run instead with `--alone`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1000, help="of the training; the graph stays the same")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed up")
    parser.add_argument("--directory", type=Path, default=directory, help="where the runs go")
    if alone is not None:
        parser.add_argument("--alone", action="store_true", help="the run to compare with instead")
    given = parser.parse_args()
    if alone is not None and given.alone:
        run = alone
    torch.set_num_threads(1)
    folders = {seed: given.directory / f"seed{seed}" for seed in range(given.seed, given.seed + given.seeds)}
    if given.seeds == 1:
        folders = {given.seed: given.directory}
    results = {seed: run(seed, folder) for seed, folder in folders.items()}
    print(f"\nseed  optimality at each evaluation{'':24}CPU seconds: {', '.join(results[given.seed].seconds)}")
    for seed, result in results.items():
        seconds = "".join(f"{value:7.1f}" for value in result.seconds.values())
        print(f"{seed}  {_line(result.curve):<56}{seconds}")
        for name, curve in result.more.items():
            print(f"      {_line(curve)}  {name}")
    last = results[given.seed].directory
    print(f"\nrun folder: {last}\nreport:     {last / 'report.html'}")


def _line(curve: list[float]) -> str:
    before, *after = (f"{value:.3f}" for value in curve)
    return f"{before} -> {' '.join(after)}"
