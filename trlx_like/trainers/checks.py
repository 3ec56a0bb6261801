"""Checks of the arguments of a trainer, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.config.elsewhere import answers
from trlx_like.errors import ConfigError

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Callable[..., None])


def require_method(name: str, config: TRLConfig, method_class: type[MethodConfig]) -> None:
    """Raise ConfigError unless the section `method` is of the class that a trainer works with."""
    if not isinstance(config.method, method_class):
        needed = f"{method_class.__name__}, not {config.method.name}"
        raise ConfigError(f"train.trainer ({name}) needs method.name: {needed}.")


def takes_a_config(init: C) -> C:
    """Check the class and the configuration of a trainer before its constructor runs.

    A call in the shape of TRL's is answered with ConfigError, and not with TypeError.
    """

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [*args, *(value for name, value in kwargs.items() if name == "config")]
        if len(given) != 1 or not isinstance(given[0], TRLConfig):
            shown = ", ".join(type(value).__name__ for value in given) or "nothing"
            takes = f"{type(self).__name__} takes one TRLConfig, not ({shown}), and all else by name."
            raise ConfigError(f"{takes} {_here(kwargs)}".rstrip())
        refuse_removed_hooks(type(self))
        require_method(type(self).__name__, given[0], self.method_class)
        init(self, *args, **kwargs)

    return cast(C, call)


def _here(names: Iterable[str]) -> str:
    known = answers("arguments")
    return " ".join(f"{name}: here this is {known[name]}." for name in names if name in known)


def refuse_unused(trainer_class: Any, given: Mapping[str, Any], stop_sequences: Sequence[str] = ()) -> None:
    """Raise ConfigError for data that a trainer does not take, and for an empty stop sequence."""
    if "" in stop_sequences:
        raise ConfigError("stop_sequences has an empty string, which would end every response at once.")
    name, uses = trainer_class.__name__, sorted(trainer_class.uses)
    if unused := [word for word, value in given.items() if value is not None and word not in uses]:
        takes = f"it takes {', '.join(uses) or 'no data'}."
        raise ConfigError(f"{name} cannot use {', '.join(unused)}; {takes} {_here(unused)}".rstrip())


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


BY_HAND = ("decode", "generate", "generate_eval")


def refuse_removed_hooks(trainer_class: type) -> None:
    """Check that what a subclass overrides is called, so that its code does not silently stand idle.

    Raises:
        ConfigError: If it has a hook that is not called; the error says what to write instead.
    """
    for name, advice in answers("hooks").items():
        if hasattr(trainer_class, name):
            raise ConfigError(f"{trainer_class.__name__}.{name} is not called by the loop: {advice}.")
    for name in BY_HAND:
        owner = next((cls for cls in trainer_class.__mro__ if name in vars(cls)), trainer_class)
        if not owner.__module__.startswith("trlx_like.") and any(hasattr(cls, name) for cls in owner.__mro__[1:]):
            logger.warning(
                f"{owner.__name__}.{name} is called by your code only; rollouts and evaluation sample with what "
                "make_engine returns."
            )


FUNCTIONS = {
    "log_fn": "on_step, which gets the metrics of a step",
    "save_fn": "on_save, which gets the folder of a checkpoint",
    "eval_fn": "on_evaluate, which gets the metrics of an evaluation",
}


def refuse_functions(given: Iterable[str]) -> None:
    """Raise ConfigError for arguments of `learn`: those of trlX are methods of a `Callback` here."""
    for name in given:
        if name not in FUNCTIONS:
            raise ConfigError(f"learn takes no {name}.")
        raise ConfigError(f"learn({name}=...): pass callbacks=[...] instead, a Callback with {FUNCTIONS[name]}.")
