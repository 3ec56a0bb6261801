"""Tune language and diffusion models by rewards and preferences: `trlx_like.train(config, reward_fn, prompts)`.

Importing this package imports no torch: every name below is looked up when it is first used. Type checkers and editors
read `__init__.pyi`, which `scripts/exports.py` writes from the tables below.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trlx_like.algorithms import ALGORITHMS

__version__ = "0.1.0"

_SHARED = {
    "api": "train",
    "config": "TRLConfig ModelConfig TokenizerConfig OptimizerConfig SchedulerConfig TrainConfig DataConfig "
    "SamplerConfig BackendConfig RewardFnConfig MethodConfig register_method register_trainer",
    "models.diffusion_families": "register_diffusion_family",
    "models.reference": "create_reference_model",
    "models.value_head": "AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead",
    "models.wrapper": "PreTrainedModelWrapper",
    "pipelines.prompts": "register_datapipeline",
    "rewards.judges": "WinRate register_judge",
    "rewards.models": "RewardModel",
    "rewards.weighted": "WeightedRewards",
    "samplers.guided": "AutoModelForCausalLMWithILQLHeads AutoModelForSeq2SeqLMWithILQLHeads",
    "tracking": "register_tracker",
    "trainers.base": "BaseRLTrainer LossOutput",
    "trainers.callbacks": "Callback",
    "trainers.online": "OnlineTextTrainer",
    "trainers.text": "TextTrainer",
}
_NAMES = {name: module for module, names in _SHARED.items() for name in names.split()}
_NAMES |= {name: module for row in ALGORITHMS for name, module in row.exports.items()}
_ALIASES = {alias: row.trainer for row in ALGORITHMS for alias in row.aliases}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    own = _ALIASES.get(name, name)
    if own not in _NAMES:
        raise AttributeError(f"module 'trlx_like' has no attribute {name!r}")
    return getattr(import_module(f"trlx_like.{_NAMES[own]}"), own)


def __dir__() -> list[str]:
    return sorted(__all__)
