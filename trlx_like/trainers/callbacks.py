"""What a user can hang into the loop: `train(callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Override what you need. `trainer` is the running trainer; every process calls its own callbacks."""

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first step, after a resume."""

    def on_experience(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """After the store was filled for a round."""

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> bool | None:
        """After an optimiser step. False ends training: the run is saved and `learn` returns."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_save(self, trainer: Any, directory: Path) -> None:
        """After a checkpoint was published, `best_checkpoint` included."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step."""
