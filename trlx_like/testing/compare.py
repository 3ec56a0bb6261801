"""Compare two runs bit by bit, or up to rounding. What differs is an AssertionError that says where."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trlx_like.tracking.jsonl import FILES
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.interrupt import Interrupted


class StopAfter(Callback):
    """Send the process a signal in its `step`-th step, as `kill` would."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step = step
        self.number = number

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), self.number)


def run_until_stopped(trainer: Any, code: int = 143) -> None:
    """Train until a signal ends the run, which leaves a checkpoint of its last step."""
    try:
        trainer.learn()
    except Interrupted as stopped:
        must(stopped.code == code, f"the run ended with the exit code {stopped.code}, not {code}")
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


def assert_same(got: Any, expected: Any, place: str = "") -> None:
    """Compare bit by bit, types included; the AssertionError says where the two first differ."""
    must(type(got) is type(expected), f"{place}: {type(got).__name__}, not {type(expected).__name__}")
    if isinstance(expected, Mapping):
        must(list(got) == list(expected), f"{place}: has {list(got)}, not {list(expected)}")
        for key, value in expected.items():
            assert_same(got[key], value, f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        must(len(got) == len(expected), f"{place}: {len(got)} entries, not {len(expected)}")
        for row, value in enumerate(expected):
            assert_same(got[row], value, f"{place}[{row}]")
    elif isinstance(expected, torch.Tensor):
        must(got.dtype == expected.dtype and got.shape == expected.shape, f"{place}: tensors of two kinds")
        same = got.contiguous().view(torch.uint8) if got.dim() else got
        other = expected.contiguous().view(torch.uint8) if expected.dim() else expected
        if not torch.equal(same, other):
            apart = (got.double() - expected.double()).abs().max()
            raise AssertionError(f"{place}: tensors differ by up to {apart}")
    elif hasattr(expected, "tobytes"):
        must(got.tobytes() == expected.tobytes(), f"{place}: arrays differ")
    else:
        must(got == expected, f"{place}: {got!r} is not {expected!r}")


def assert_same_run(got: Any, expected: Any, folder: Path, other: Path) -> None:
    """Compare two trainers and their run folders: all state, metrics, samples and used rows."""
    assert_same(state_of(got), state_of(expected), "state")
    for name in FILES:
        assert_same(rows(folder, name), rows(other, name), name)


def apart(one: Any, other: Any, place: str = "") -> float:
    """Return the largest difference of two numbers or tensors at the same place of two trees of the same form.

    Numbers above 1 are compared relative to their size. Other leaves have to be equal.
    """
    must(type(one) is type(other), f"{place}: {type(one).__name__} and {type(other).__name__}")
    if isinstance(one, Mapping):
        must(list(one) == list(other), f"{place}: {set(one) ^ set(other)} is in one of the two only")
        return max((apart(value, other[name], f"{place}.{name}") for name, value in one.items()), default=0.0)
    if isinstance(one, list | tuple):
        must(len(one) == len(other), f"{place}: {len(one)} and {len(other)} entries")
        return max((apart(*pair, place) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, torch.Tensor):
        must((one.shape, one.dtype) == (other.shape, other.dtype), f"{place}: tensors of two kinds")
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, float) and one == one and other == other:
        return float(abs(one - other) / max(1.0, abs(one)))
    must(one == other or (one != one and other != other), f"{place}: {one!r} and {other!r}")
    return 0.0
