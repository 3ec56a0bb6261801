"""Measure how much a slow reward function costs a run, with and without workers.

    python -m benchmarks.rewards [--workers 0 1 2] [--seconds 0.4] [--rounds 6] [--chunks 4] [--json out.json]

The run is PPO with a GPT-2 of random weights. The reward sleeps for each chunk, like a function that waits for a server
or a compiler; the model determines how long a chunk takes to generate. A run is timed from its second round on, when
the workers have started. Wall seconds depend on everything that runs on the machine; CPU seconds are those of this
process.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trlx_like
from benchmarks.measure import arguments
from benchmarks.ppo import config
from trlx_like.trainers.callbacks import Callback


class Slow:
    """Sleep for each chunk, and return different rewards."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, outputs: Sequence[str]) -> list[float]:
        time.sleep(self.seconds)
        return [float(len(output) % 7) for output in outputs]


class Rounds(Callback):
    """Record when the experience of each round was complete."""

    def __init__(self) -> None:
        self.spent: list[tuple[float, float, float, float]] = []

    def on_experience(self, trainer: Any, metrics: Any) -> None:
        phases = trainer.clock.wall
        self.spent.append((time.perf_counter(), time.process_time(), phases["generate"], phases["reward"]))
        phases.clear()


def measured(given: argparse.Namespace, workers: int) -> dict[str, float]:
    rng = random.Random(0)
    prompts = [" ".join(str(rng.randrange(given.vocabulary - 1)) for _ in range(given.prompt)) for _ in range(512)]
    rounds = Rounds()
    with tempfile.TemporaryDirectory() as folder:
        given.steps = given.rounds
        changes = {"chunk_size": given.rollouts // given.chunks, "ppo_epochs": 1}
        made = config(given, Path(folder)).evolve(
            method=changes, reward={"workers": workers}, train={"batch_size": given.rollouts}
        )
        trlx_like.train(made, Slow(given.seconds), prompts, eval_prompts=prompts[:1], callbacks=[rounds])
    first, *_, last = rounds.spent
    count = len(rounds.spent) - 1
    generate, waited = (sum(row[place] for row in rounds.spent[1:]) / count for place in (2, 3))
    return {
        "workers": workers,
        "wall_seconds_a_round": round((last[0] - first[0]) / count, 3),
        "cpu_seconds_a_round": round((last[1] - first[1]) / count, 3),
        "wall_generate": round(generate, 3),
        "wall_waiting_for_rewards": round(waited, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="what to compare (default 0 1 2)")
    parser.add_argument("--seconds", type=float, default=0.4, help="that the reward of a chunk takes (default 0.4)")
    for name, default, text in (
        ("rounds", 6, "rounds of a run, of which the first is not counted"),
        ("chunks", 4, "chunks of a round"),
        ("rollouts", 128, "responses a round"),
        ("layers", 6, "blocks of the model"),
        ("width", 144, "its hidden size"),
        ("vocabulary", 2000, "its tokens"),
        ("prompt", 8, "tokens of a prompt"),
        ("response", 24, "tokens of a response, at most"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.set_defaults(unfrozen=-1, batch_size=64, epochs=1)
    given = arguments(parser)
    results = [measured(given, workers) for workers in given.workers]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
