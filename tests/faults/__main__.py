"""`python -m tests.faults --points 200`: kill runs of every trainer at drawn points, and print what became of them."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.contract.recipes import ONE_PROCESS, scenarios
from tests.distributed.matrix import KINDS, import_deepspeed
from tests.faults import kills, system_calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every killed and resumed run is the run that was never killed."""
    options = _options().parse_args(arguments)
    chance = random.Random(options.seed)
    kills.OPTIONS |= {"train.async_save": options.async_save, **KINDS[options.backend]}
    if options.backend.startswith("zero"):
        import_deepspeed()
    kinds = options.kind or [kind for kind in kills.KINDS if kind != "publish" or system_calls.available()]
    runs = [key for key in scenarios() if options.variants or key in kills.trainers()]
    runs = [key for key in runs if options.ranks == 1 or key not in ONE_PROCESS]
    of_trainer = {
        name: [key for key in runs if scenarios()[key][0] == name] for name in options.trainer or kills.trainers()
    }
    cells = [(name, kind) for name in of_trainer for kind in kinds]
    chosen = [(chance.choice(of_trainer[name]), kind) for name, kind in (cells * options.points)[: options.points]]
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"{options.points} points with seed {options.seed}, {options.ranks} process(es) a run.", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        names = sorted({scenario for scenario, _ in chosen})
        wholes = [pool.submit(kills.whole, name, folder / "whole" / name, options.ranks) for name in names]
        expected = {name: future.result() for name, future in zip(names, wholes, strict=True)}
        print(f"{len(names)} runs that are not killed: {time.monotonic() - began:.0f} s.", flush=True)
        points = [kills.draw(chance, scenario, kind, expected[scenario].events) for scenario, kind in chosen]
        attempts = [
            pool.submit(kills.attempt, point, expected[point.scenario], folder / f"{number}")
            for number, point in enumerate(points)
        ]
        outcomes = []
        for number, future in enumerate(attempts):
            outcomes.append(outcome := future.result())
            if outcome.difference:
                print(f"{outcome.point}, in {folder / str(number)}: {outcome.difference}", flush=True)
    print(table(outcomes))
    differing = sum(bool(outcome.difference) for outcome in outcomes)
    killed = sum(outcome.killed for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed, {differing} differ; {time.monotonic() - began:.0f} s.")
    return 1 if differing else 0


def table(outcomes: Sequence[kills.Outcome]) -> str:
    """Equal runs of killed runs, by trainer and kind."""
    kinds = [kind for kind in kills.KINDS if any(outcome.point.kind == kind for outcome in outcomes)]
    trainers = [name for name in kills.trainers() if any(_trainer(outcome) == name for outcome in outcomes)]
    lines = ["equal / killed", "".join(f"{word:>18}" for word in ("", *kinds, "all"))]
    for name in (*trainers, "all"):
        cells = []
        for kind in (*kinds, "all"):
            some = [o for o in outcomes if name in ("all", _trainer(o)) and kind in ("all", o.point.kind) and o.killed]
            cells.append(f"{sum(not outcome.difference for outcome in some)} / {len(some)}")
        lines.append("".join(f"{word:>18}" for word in (name, *cells)))
    return "\n".join(lines)


def _trainer(outcome: kills.Outcome) -> str:
    return scenarios()[outcome.point.scenario][0]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=main.__doc__)
    parser.add_argument("--points", type=int, default=200, help="number of kills")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run, of which one is killed")
    backends = ["ddp", "fsdp", "layers", "zero1", "zero2", "zero3"]
    parser.add_argument("--backend", default="ddp", choices=backends, help="what holds the weights of each run")
    parser.add_argument("--trainer", action="append", choices=kills.trainers(), help="by default every registered one")
    parser.add_argument("--kind", action="append", choices=list(kills.KINDS), help="kind of point, by default all")
    parser.add_argument("--seed", type=int, default=0, help="draws the points")
    parser.add_argument("--async-save", action="store_true", help="write checkpoints beside training")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--no-variants", dest="variants", action="store_false", help="leave the recipes' variants out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
