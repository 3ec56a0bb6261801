"""Compare two runs bit by bit, or up to rounding. What differs is an AssertionError that says where."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trlx_like.tracking.jsonl import FILES
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.interrupt import Interrupted


class StopAfter(Callback):
    """Send the process SIGTERM in its `step`-th step, as `kill` would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def run_until_stopped(trainer: Any) -> None:
    """Train until SIGTERM ends the run, which leaves a checkpoint of its last step."""
    try:
        trainer.learn()
    except Interrupted as stopped:
        must(stopped.code == 143, f"the run ended with the exit code {stopped.code}, not 143")
    else:
        raise AssertionError("no signal ended the run")


def state_of(trainer: Any) -> dict[str, Any]:
    """Return a copy of everything that a checkpoint would hold."""
    return {name: copy.deepcopy(kept.item.state_dict()) for name, kept in trainer.state.items.items()}


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read the rows of a run's file, without what a clock says."""
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def must(claim: bool, sentence: str) -> None:
    """Raise an AssertionError with the sentence unless the claim holds, also under `python -O`."""
    if not claim:
        raise AssertionError(sentence)


def _leaves(got: Any, expected: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values at the same places of two trees; AssertionError where the trees have different forms."""
    must(type(got) is type(expected), f"{place}: {type(got).__name__}, not {type(expected).__name__}")
    if isinstance(expected, Mapping):
        must(list(got) == list(expected), f"{place}: has {list(got)}, not {list(expected)}")
        for key, value in expected.items():
            yield from _leaves(got[key], value, f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        must(len(got) == len(expected), f"{place}: {len(got)} entries, not {len(expected)}")
        for row, value in enumerate(expected):
            yield from _leaves(got[row], value, f"{place}[{row}]")
    else:
        if isinstance(expected, torch.Tensor):
            must(got.dtype == expected.dtype and got.shape == expected.shape, f"{place}: tensors of two kinds")
        yield place, got, expected


def assert_same(got: Any, expected: Any, place: str = "") -> None:
    """Compare bit by bit, types included; the AssertionError says where the two first differ."""
    for at, one, other in _leaves(got, expected, place):
        if isinstance(other, torch.Tensor):
            if not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (one, other))):
                raise AssertionError(f"{at}: tensors differ by up to {(one.double() - other.double()).abs().max()}")
        elif hasattr(other, "tobytes"):
            must(one.tobytes() == other.tobytes(), f"{at}: arrays differ")
        else:
            must(one == other, f"{at}: {one!r} is not {other!r}")


def assert_same_run(got: Any, expected: Any, folder: Path, other: Path) -> None:
    """Compare two trainers and their run folders: all state, metrics, samples and used rows."""
    assert_same(state_of(got), state_of(expected), "state")
    for name in FILES:
        assert_same(rows(folder, name), rows(other, name), name)


def apart(one: Any, other: Any, place: str = "") -> float:
    """Return the largest difference of two numbers or tensors at the same place of two trees of the same form.

    Numbers above 1 are compared relative to their size. Other leaves have to be equal.
    """
    return max((_distance(at, *pair) for at, *pair in _leaves(one, other, place)), default=0.0)


def _distance(place: str, one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, float) and one == one and other == other:
        return float(abs(one - other) / max(1.0, abs(one)))
    must(one == other or (one != one and other != other), f"{place}: {one!r} and {other!r}")
    return 0.0
