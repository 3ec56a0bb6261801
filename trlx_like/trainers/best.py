"""Which evaluation is the best so far, and whether a run has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trlx_like.errors import ConfigError

if TYPE_CHECKING:
    from trlx_like.config import TrainConfig
    from trlx_like.trainers.progress import Progress

logger = logging.getLogger(__name__)

DEFAULTS = ("reward/mean", "metrics/reward", "eval/losses/total_loss")
"""The metric by which checkpoints are compared if `train.best_metric` is null: the first that an evaluation has."""


def watched(
    metrics: Mapping[str, float], name: str | None, mode: str | None = None, option: str = "train.best_metric"
) -> tuple[float, float] | None:
    """Return the metric by which evaluations are compared, the best one of a sweep.

    Args:
        metrics: The metrics of an evaluation.
        name: The metric; None takes the first of `DEFAULTS`.
        mode: Whether it should be "max" or "min"; None: min for losses and perplexities, max for all others.
        option: The option that names the metric, for errors.

    Returns:
        The value, and 1 if higher is better, -1 if lower is; None if `name` is None and there is no default metric.

    Raises:
        ConfigError: If the evaluation does not report the metric `name`.
    """
    for wanted in DEFAULTS if name is None else (name,):
        low = mode == "min" if mode else "loss" in wanted or wanted.endswith("perplexity")
        sign = -1.0 if low else 1.0
        values = [value for key, value in metrics.items() if key.startswith(f"{wanted}@")]
        if wanted in metrics or values:
            return metrics.get(wanted, sign * max((sign * value for value in values), default=0.0)), sign
    if name is not None:
        raise ConfigError(f"{option} ({name!r}) is not reported by the evaluation: {', '.join(metrics)}.")
    return None


def note_best(train: TrainConfig, progress: Progress, metrics: Mapping[str, float]) -> bool:
    """Return whether an evaluation is the best so far, and remember in `progress` what was compared.

    Args:
        train: The options of section `train`.
        progress: The position of the run, with the best values so far and the evaluations without an improvement.
        metrics: The metrics of the evaluation. NaN is never the best.
    """
    if train.early_stopping is not None:
        _note_improvement(train, progress, metrics)
    found = watched(metrics, train.best_metric, train.best_mode) if train.save_best else None
    if found is None or not _is_better(found, progress.best):
        return False
    progress.best = found[0]
    return True


def exhausted(train: TrainConfig, progress: Progress) -> bool:
    """Return whether `train.early_stopping` ends the run."""
    return train.early_stopping is not None and progress.stale >= train.early_stopping["patience"]


def ended_by(train: TrainConfig, progress: Progress) -> str:
    """Return the option that ended a finished run, with its value."""
    if exhausted(train, progress):
        return f"train.early_stopping ({train.early_stopping})"
    limits = {"total_steps": progress.step, "max_empty_rounds": progress.empty_rounds}
    name = next((name for name, count in limits.items() if count >= getattr(train, name)), "epochs")
    return f"train.{name} ({getattr(train, name)})"


def _note_improvement(train: TrainConfig, progress: Progress, metrics: Mapping[str, float]) -> None:
    options: dict[str, Any] = train.early_stopping or {}
    name = options.get("metric", train.best_metric)
    mode = options.get("mode", train.best_mode if name == train.best_metric else None)
    found = watched(metrics, name, mode, "train.early_stopping.metric" if "metric" in options else "train.best_metric")
    if found is None:
        raise ConfigError(
            f"train.early_stopping needs a metric of the evaluation, which reports {', '.join(metrics) or 'none'}."
        )
    if _is_better(found, progress.record, options.get("min_delta", 0.0)):
        progress.record, progress.stale = found[0], 0
        return
    progress.stale += 1
    if exhausted(train, progress):
        logger.info("Stopping early: %d evaluations did not improve on %g.", progress.stale, progress.record or 0.0)


def _is_better(found: tuple[float, float], best: float | None, min_delta: float = 0.0) -> bool:
    value, sign = found
    return not math.isnan(value) and (best is None or sign * (value - best) > min_delta)
