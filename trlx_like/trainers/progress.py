"""The position of a run in training, which every checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Hold the position of a run in training. Every checkpoint holds all of it."""

    step: int = 0  # optimiser steps done
    round: int = 0  # rounds begun; a round is: make experience, then optimise on it
    position: int = 0  # batches of this round done
    in_round: bool = False
    nonfinite_steps: int = 0  # steps whose loss or gradient was NaN or infinite
    nonfinite_in_row: int = 0  # how many of them came last, without a good step between
    empty_rounds: int = 0  # rounds without a step that came last
    rollbacks: int = 0  # times that the run went back to a checkpoint
    losses: list[float] = field(default_factory=list)  # the last ones, to tell when one is out of range
    shown: int | None = None  # step before the round whose samples were last shown
    best: float | None = None  # best value of the metric that `train.save_best` watches
    record: float | None = None  # the same of `train.early_stopping`
    stale: int = 0  # evaluations since then
    used: list[dict[str, Any]] = field(default_factory=list)  # of the ledger, what is not written yet
    tracker: dict[str, str] = field(default_factory=dict)  # ids by which trackers find their run again

    @property
    def fresh(self) -> bool:
        """Whether the next step is the first on this round's experience."""
        return self.in_round and self.position == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields by name, for a checkpoint."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields from a checkpoint."""
        vars(self).update(state)
