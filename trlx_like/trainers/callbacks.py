"""Hooks that a user adds to the training loop: `train(callbacks=[...])`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError


class Callback:
    """Act at fixed points of training: derive from this class and override the hooks that you need.

    Every process calls its own callbacks. Each hook gets the running trainer as `trainer`.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Act before the first step. The checkpoint of a resumed run is loaded by then."""

    def on_experience(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Act after a round's experience was made; `metrics` are those of its rollouts."""

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> bool | None:
        """Act after an optimiser step.

        Args:
            trainer: The running trainer.
            metrics: The metrics of the step.

        Returns:
            False to end training: the run is saved and `learn` returns. Anything else continues.
        """

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Act after an evaluation; `metrics` are its results."""

    def on_save(self, trainer: Any, directory: Path) -> None:
        """Act after a checkpoint (also `best_checkpoint`) was written completely to `directory`.

        With `train.async_save` it is called at the next evaluation or checkpoint after that.
        """

    def on_train_end(self, trainer: Any) -> None:
        """Act after the last step."""


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return callbacks as a list; ConfigError for an object without the hooks, such as one of transformers."""
    for callback in callbacks:
        if isinstance(callback, type) or not all(callable(getattr(callback, hook, None)) for hook in HOOKS):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise ConfigError(
                f"callbacks: {name} is no Callback: pass an object of a class that derives from trlx_like.Callback, "
                f"whose hooks are {', '.join(HOOKS)}."
            )
    return list(callbacks)


def call(callbacks: Sequence[Callback], hook: str, trainer: Any, *args: Any) -> bool:
    """Call a hook of each callback; return whether one of them answered False."""
    answers = [getattr(callback, hook)(trainer, *args) for callback in callbacks]  # each is asked
    return any(answer is False for answer in answers)
