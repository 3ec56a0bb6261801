"""Making the reward function that a user's `reward_fn` stands for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trlx_like.errors import ConfigError
from trlx_like.imports import is_python_name
from trlx_like.pipelines.sources import load_function
from trlx_like.rewards.library import FUNCTIONS, named_reward
from trlx_like.rewards.rubric import rubric
from trlx_like.rewards.weighted import WeightedRewards, parts_of


def make_reward(spec: Any, weights: Sequence[float] | None = None, option: str = "reward_fn") -> Callable[..., Any]:
    """Make the reward function that `spec` stands for.

    Args:
        spec: A function; a reward model (a `RewardModel`, its folder or hub name, or a classifier of transformers);
            `module:function` or `file.py:function`; the name of a function of the library (`rewards/library.py`), or a
            mapping with its name and options or those of a rubric (`rewards/rubric.py`); or a list of these.
        weights: The option `reward.weights`, for a list.
        option: The name of `spec` in errors.

    Raises:
        ConfigError: `spec` is none of these, or the weights do not fit it.
    """
    _check_weights(spec, weights, option)
    if not isinstance(spec, (list, tuple)):
        return _one(spec, option)
    given = [_one(part, f"{option}[{place}]") for place, part in enumerate(spec)]
    parts = [part if isinstance(part, WeightedRewards) else WeightedRewards([part]) for part in given]
    return WeightedRewards(
        [function for part in parts for function in part.functions],
        [w * own for w, part in zip(weights or [1.0] * len(parts), parts, strict=True) for own in part.weights],
        [name for part in parts for name in part.names],
    )


def _check_weights(spec: Any, weights: Sequence[float] | None, option: str) -> None:
    if not isinstance(spec, (list, tuple)):
        if weights is not None:
            own = "It has weights of its own." if isinstance(spec, WeightedRewards) else "It is one function."
            raise ConfigError(f"reward.weights ({list(weights)}) needs a list of functions as {option}. {own}")
    elif not spec or (weights is not None and len(weights) != len(spec)):
        raise ConfigError(
            f"{option} must be a list of at least one function, and reward.weights have one for each: {len(spec)} "
            f"functions, {'no' if weights is None else len(weights)} weights."
        )


def _one(spec: Any, option: str) -> Callable[..., Any]:
    if isinstance(spec, str) and spec in FUNCTIONS and not names_reward_model(spec):
        return named_reward({"name": spec}, option)
    if isinstance(spec, Mapping):
        return rubric(spec, option) if spec.get("name") == "rubric" else named_reward(spec, option)
    path = os.fspath(spec) if isinstance(spec, (str, os.PathLike)) else None
    if path is not None and not names_reward_model(path):
        return load_function(path, option)
    if path is not None or (hasattr(spec, "from_pretrained") and not isinstance(spec, type)):
        from trlx_like.rewards.models import RewardModel

        return RewardModel(spec if path is None else os.path.expanduser(path), option=option)
    if not callable(spec):
        raise ConfigError(
            f"{option} must be a function, a reward model, its folder, module:function, file.py:function, a mapping "
            f"with a name, or a list of these, not {spec!r}."
        )
    return cast("Callable[..., Any]", spec)


def check_reward(spec: Any, option: str, weights: Sequence[float] | None = None) -> str:
    """Describe the reward function that a YAML file names, without loading a model.

    Raises:
        ConfigError: As `make_reward`.
    """
    _check_weights(spec, weights, option)
    if isinstance(spec, list):
        return ", ".join(check_reward(part, f"{option}[{place}]") for place, part in enumerate(spec))
    if isinstance(spec, Mapping) or (spec in FUNCTIONS and not names_reward_model(spec)):
        return ", ".join(parts_of(_one(spec, option)))
    if not names_reward_model(spec):
        load_function(spec, option)
    else:
        from trlx_like.models.reward_model import check_reward_model
        from trlx_like.models.sources import check_place

        path = os.path.expanduser(spec)
        check_place(path, option)
        if Path(path).is_dir():  # a hub name would need the network
            check_reward_model(path, option)
    return str(spec)


def names_reward_model(spec: str) -> bool:
    """Tell whether the name of a reward function is that of a model: a folder, or owner/name on the hub."""
    hub = spec.count("/") == 1 and not spec.endswith(".py") and not is_python_name(spec)
    return os.path.isdir(os.path.expanduser(spec)) or hub
