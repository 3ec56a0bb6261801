"""Runs of trainers, and what of two runs must be the same."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trlx_like.tracking.jsonl import FILES
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.interrupt import Interrupted

Whole = Callable[..., tuple[Any, Path]]
"""The fixture `whole`: called with a recipe's name and options, it returns the run's trainer and folder."""


class StopAfter(Callback):
    """Sends the process a signal in its `step`-th step, as `kill` would."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step = step
        self.number = number

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), self.number)


def run_until_stopped(trainer: Any, code: int = 143) -> None:
    """Learns until a signal ends it, which leaves a checkpoint of its last step."""
    with pytest.raises(Interrupted) as stopped:
        trainer.learn()
    assert stopped.value.code == code


def state_of(trainer: Any) -> dict[str, Any]:
    """A copy of everything that a checkpoint would hold."""
    return {name: copy.deepcopy(kept.item.state_dict()) for name, kept in trainer.state.items.items()}


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run's file without what a clock says."""
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def assert_same(got: Any, expected: Any, place: str = "") -> None:
    """Equal bit by bit, types included; the message says where they first differ."""
    assert type(got) is type(expected), f"{place}: {type(got).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Mapping):
        assert list(got) == list(expected), place
        for key, value in expected.items():
            assert_same(got[key], value, f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), place
        for row, value in enumerate(expected):
            assert_same(got[row], value, f"{place}[{row}]")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, place
        same = got.contiguous().view(torch.uint8) if got.dim() else got
        other = expected.contiguous().view(torch.uint8) if expected.dim() else expected
        equal = torch.equal(same, other)  # asserted by its result: the numbers would fill the screen
        assert equal, f"{place}: tensors differ by up to {(got.double() - expected.double()).abs().max()}"
    elif hasattr(expected, "tobytes"):
        assert got.tobytes() == expected.tobytes(), place
    else:
        assert got == expected, f"{place}: {got!r} is not {expected!r}"


def assert_same_run(got: Any, expected: Any, folder: Path, other: Path) -> None:
    """Two trainers and their folders: all state, metrics, samples and used rows."""
    assert_same(state_of(got), state_of(expected), "state")
    for name in FILES:
        assert_same(rows(folder, name), rows(other, name), name)
