"""Traces of every recipe, to show that a refactoring changes no number.

    python -m tests.contract.trace write before.json      # on the code as it was
    python -m tests.contract.trace compare before.json    # on the code as it is

A trace holds, for each of ten optimiser steps, the loss, the gradient norm and a digest of all parameters; the numbers
are compared bit for bit. `--only NAME` restricts both commands to recipes whose name contains NAME.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.contract.recipes import RECIPES, make
from trlx_like.trainers.callbacks import Callback

STEPS = 10


class Recorder(Callback):
    """Records one row a step: the loss and the gradient norm as hexadecimal floats, and the parameters' digest."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        digest = hashlib.sha256()
        for _, parameter in sorted(trainer.model.named_parameters()):
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        numbers = [float(metrics[name]).hex() for name in ("losses/total_loss", "grad_norm")]
        self.rows.append([*numbers, digest.hexdigest()])


def trace(name: str, changes: Mapping[str, Any], folder: Path) -> list[list[str]]:
    """Run a recipe with changes for `STEPS` steps and return what was recorded."""
    recorder = Recorder()
    options = {**changes, "train.total_steps": STEPS, "train.epochs": 100, "train.checkpoint_interval": 100}
    make(name, folder, **options, callbacks=[recorder]).learn()
    return recorder.rows


def traces(only: str) -> dict[str, list[list[str]]]:
    """The traces of all recipes and variants, by "trainer / variant"."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            for variant, changes in {
                "plain": {},
                "minibatch 1": {"train.minibatch_size": 1},
                **recipe.variants,
            }.items():
                label = f"{name} / {variant}"
                if only in label:
                    found[label] = trace(name, changes, Path(folder) / label.replace(" / ", "_"))
                    print(label, len(found[label]), flush=True)
    return found


def difference(before: list[list[str]], after: list[list[str]]) -> str | None:
    """Describe how two traces differ: the largest relative differences, and the steps with other parameters."""
    if len(before) != len(after):
        return f"{len(before)} steps before, {len(after)} after"
    if before == after:
        return None
    pairs = list(zip(before, after, strict=True))
    apart = [max(_relative(old[column], new[column]) for old, new in pairs) for column in (0, 1)]
    moved = [step for step, (old, new) in enumerate(pairs, 1) if old[2] != new[2]]
    where = f"parameters from step {moved[0]} on" if moved else "no parameter"
    return f"loss off by {apart[0]:.1e} and gradient norm by {apart[1]:.1e} at most (relative), {where}"


def _relative(old: str, new: str) -> float:
    """The relative difference of two hexadecimal floats."""
    before, after = float.fromhex(old), float.fromhex(new)
    return abs(before - after) / max(abs(before), 1e-12)


def main() -> int:
    """Write or compare traces; return 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    found = traces(options.only)
    if options.action == "write":
        options.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0
    before = json.loads(options.file.read_text(encoding="utf-8"))
    expected = {label for label in before if options.only in label}
    different = {label: difference(before[label], found[label]) for label in found if label in before}
    for label, what in different.items():
        if what:
            print(f"{label}: {what}")
    equal = sum(what is None for what in different.values())
    print(f"{equal} of {len(expected)} traces are equal bit for bit.")
    return int(equal < len(expected))


if __name__ == "__main__":
    sys.exit(main())
