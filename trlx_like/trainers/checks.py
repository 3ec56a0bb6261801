"""Checks of the arguments of a trainer, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.errors import ConfigError


def require_method(name: str, config: TRLConfig, method_class: type[MethodConfig]) -> None:
    """Raise ConfigError unless the section `method` is of the class that a trainer works with."""
    if not isinstance(config.method, method_class):
        needed = f"{method_class.__name__}, not {config.method.name}"
        raise ConfigError(f"train.trainer ({name}) needs method.name: {needed}.")


def refuse_unused(name: str, data: Iterable[str], uses: Collection[str], stop_sequences: Sequence[str]) -> None:
    """Raise ConfigError for data that a trainer does not take, and for an empty stop sequence."""
    if "" in stop_sequences:
        raise ConfigError("stop_sequences has an empty string, which would end every response at once.")
    if unused := ", ".join(sorted(set(data) - set(uses))):
        raise ConfigError(f"{name} cannot use {unused}; it takes {', '.join(sorted(uses)) or 'no data'}.")


def require(config: TRLConfig, names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Check that the arguments of `train` that a trainer needs are given.

    Args:
        config: The complete configuration.
        names: The needed arguments. For "reward_fn or judge", one of the two is enough.
        given: The arguments by name.

    Raises:
        ConfigError: If one is missing.
    """
    for name in names:
        either = name.split(" or ")
        if all(given.get(one) is None for one in either):
            ways = " or ".join(f"train({one}=...)" for one in either)
            keys = " or ".join(f"data.{one}" for one in either)
            raise ConfigError(f"{config.train.trainer} needs {name}: pass {ways} or set {keys}.")


REMOVED_HOOKS = {
    "check_sampler": "trainer.agreement does this",
    "counted": "return counts by name from units",
    "counts": "return counts by name from units",
    "make_generator": "override make_engine",
    "observe": "override record",
}


def refuse_removed_hooks(trainer_class: type) -> None:
    """Raise a ConfigError if a subclass overrides a hook that is no longer called, and say what to write instead."""
    for name, advice in REMOVED_HOOKS.items():
        if hasattr(trainer_class, name):
            raise ConfigError(f"{trainer_class.__name__}.{name} is not called any more: {advice}.")


def watched(metrics: Mapping[str, float], name: str | None) -> float | None:
    """Return the metric by which checkpoints are compared, the highest one of a sweep.

    Args:
        metrics: The metrics of an evaluation.
        name: `train.best_metric`; None takes reward/mean, or metrics/reward without it.

    Returns:
        The value; None if `name` is None and the evaluation has neither metric.

    Raises:
        ConfigError: If the evaluation does not report the metric `name`.
    """
    for wanted in ("reward/mean", "metrics/reward") if name is None else (name,):
        values = [v for key, v in metrics.items() if key == wanted or key.startswith(f"{wanted}@")]
        if values:
            return max(values)
    if name is not None:
        raise ConfigError(f"train.best_metric ({name!r}) is not reported by the evaluation: {', '.join(metrics)}.")
    return None
