"""Shared by the examples: the problem and the seed of each run, and a summary over the problems.

A result on one graph or one maze may be luck, or a recipe that was tuned on it. So `--seeds 10` draws ten problems, one
for each seed. `--problem 3` keeps one problem, and then only the training varies.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Draw:
    """Hold the seed of one training run, the number of its problem, and its folder."""

    seed: int
    problem: int
    directory: Path


def add_options(parser: argparse.ArgumentParser, first: int, directory: Path, problem: str) -> None:
    """Add `--seed`, `--seeds`, `--problem` and `--directory`.

    Args:
        parser: The parser of the program.
        first: The default of `--seed`.
        directory: The default of `--directory`.
        problem: What is drawn, for the help, such as "graph".
    """
    parser.add_argument("--seed", type=int, default=first, help=f"seed of training, and of the {problem}")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, with seeds from --seed up")
    parser.add_argument("--problem", type=int, help=f"number of the {problem}, for all runs (default: the run's seed)")
    parser.add_argument("--directory", type=Path, default=directory, help="where the runs go")


def draws(given: argparse.Namespace) -> list[Draw]:
    """Return the runs that the options of `add_options` ask for. Several runs have a folder each."""
    return [
        Draw(
            seed,
            seed if given.problem is None else given.problem,
            given.directory if given.seeds == 1 else given.directory / f"seed{seed}",
        )
        for seed in range(given.seed, given.seed + given.seeds)
    ]


def openings(number: int) -> tuple[list[str], list[str]]:
    """Return openings of stories to train on and others to evaluate on, drawn again for every number but 0."""
    files = [Path(__file__).parent / name for name in ("story_prompts.txt", "story_eval_prompts.txt")]
    training, held_out = (file.read_text(encoding="utf-8").splitlines() for file in files)
    if number:
        both = training + held_out
        random.Random(number).shuffle(both)
        training, held_out = both[: len(training)], both[len(training) :]
    return training, held_out


def summary(
    runs: Sequence[Draw],
    values: Sequence[float],
    digits: int = 3,
    worst: Callable[[Sequence[float]], float] = min,
) -> str:
    """Write the median and the worst of the results, and how many problems and seeds they are of.

    worst: How to find the worst: `max` where less is better.
    """
    problems = len({run.problem for run in runs})
    count = f"{problems} problem{'s' if problems > 1 else ''}, {len(runs)} seed{'s' if len(runs) > 1 else ''}"
    return f"median {statistics.median(values):.{digits}f}, worst {worst(values):.{digits}f} of {count}"
