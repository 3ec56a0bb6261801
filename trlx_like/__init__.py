"""Tune language models by reinforcement and preference learning: `trlx_like.train(config, reward_fn, prompts)`.

Importing this package imports no torch: every name below is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "train": "api",
    "TRLConfig": "config",
    "ModelConfig": "config",
    "TokenizerConfig": "config",
    "OptimizerConfig": "config",
    "SchedulerConfig": "config",
    "TrainConfig": "config",
    "DataConfig": "config",
    "SamplerConfig": "config",
    "BackendConfig": "config",
    "MethodConfig": "config",
    "PPOConfig": "config",
    "SFTConfig": "config",
    "register_method": "config",
    "register_trainer": "config",
    "register_datapipeline": "pipelines.prompts",
    "register_tracker": "tracking",
    "default_ppo_config": "presets",
    "default_sft_config": "presets",
    "BaseRLTrainer": "trainers.base",
    "TextTrainer": "trainers.text",
    "OnlineTextTrainer": "trainers.online",
    "LossOutput": "trainers.base",
    "Callback": "trainers.callbacks",
    "PPOTrainer": "trainers.ppo",
    "SFTTrainer": "trainers.sft",
    "AutoModelForCausalLMWithValueHead": "models",
    "create_reference_model": "models",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'trlx_like' has no attribute {name!r}")
    return getattr(import_module(f"trlx_like.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
