"""Complete configurations to start from, made from the table in `algorithms.py`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from trlx_like.algorithms import ALGORITHMS, Algorithm
from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError


def _preset(row: Algorithm) -> Callable[[], TRLConfig]:
    """Make the function `default_<name>_config` of an algorithm."""

    def make() -> TRLConfig:
        sections = deepcopy(dict(row.preset))
        method = {"name": row.method, **sections.pop("method", {})}
        train = {"trainer": row.trainer, **sections.pop("train", {})}
        return TRLConfig.from_dict({"method": method, **sections, "train": train})

    make.__name__ = make.__qualname__ = row.default
    make.__doc__ = row.summary
    return make


PRESETS = {row.name: _preset(row) for row in ALGORITHMS}
"""Functions that make the presets, by the name of the algorithm."""


def __getattr__(name: str) -> Callable[[], TRLConfig]:
    """Return `default_<name>_config` of an algorithm of the table."""
    for row in ALGORITHMS:
        if name == row.default:
            return PRESETS[row.name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def preset_for(
    *,
    reward_fn: object = None,
    judge: object = None,
    samples: object = None,
    rewards: object = None,
    preferences: object = None,
) -> tuple[str, TRLConfig]:
    """Return the name and the configuration of the preset that fits the arguments of `train`.

    Raises `ConfigError` if the arguments fit no preset, or contradict each other.
    """
    if judge is not None:
        if samples is not None or preferences is not None:
            raise ConfigError(
                "a judge fits Online DPO, which makes its own samples: leave samples and preferences out."
            )
        return "online_dpo", PRESETS["online_dpo"]()
    if rewards is not None and samples is None:
        raise ConfigError("rewards (for ILQL) need samples: pass train(samples=...) with one reward for each.")
    if samples is not None and preferences is not None:
        raise ConfigError("samples fit SFT and preferences fit DPO; pass one of them, or a config.")
    if reward_fn is not None and samples is not None and rewards is None:
        raise ConfigError("reward_fn fits PPO and samples fit SFT; pass one of them, or a config.")
    if reward_fn is None and samples is None and preferences is None:
        raise ConfigError(
            "train() needs a config, a reward_fn (for PPO), a judge (for Online DPO), samples (for SFT), samples and "
            "rewards (for ILQL) or preferences (for DPO)."
        )
    # A reward function beside preferences, or beside samples and rewards, scores what evaluation writes.
    offline = "dpo" if preferences is not None else "ilql" if rewards is not None else None
    name = offline or ("ppo" if reward_fn is not None else "sft")
    return name, PRESETS[name]()
