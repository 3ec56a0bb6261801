"""Tune language and diffusion models by rewards and preferences: `trlx_like.train(config, reward_fn, prompts)`.

Importing this package imports no torch: every name below is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors; `_NAMES` says the same to Python.
if TYPE_CHECKING:
    from trlx_like.api import (
        train as train,
    )
    from trlx_like.config import (
        BackendConfig as BackendConfig,
        DataConfig as DataConfig,
        DDPOConfig as DDPOConfig,
        DPOConfig as DPOConfig,
        GRPOConfig as GRPOConfig,
        ILQLConfig as ILQLConfig,
        MethodConfig as MethodConfig,
        ModelConfig as ModelConfig,
        OnlineDPOConfig as OnlineDPOConfig,
        OptimizerConfig as OptimizerConfig,
        PPOConfig as PPOConfig,
        RewardConfig as RewardConfig,
        RewardFnConfig as RewardFnConfig,
        RFTConfig as RFTConfig,
        RLOOConfig as RLOOConfig,
        SamplerConfig as SamplerConfig,
        SchedulerConfig as SchedulerConfig,
        SFTConfig as SFTConfig,
        TokenizerConfig as TokenizerConfig,
        TrainConfig as TrainConfig,
        TRLConfig as TRLConfig,
        register_method as register_method,
        register_trainer as register_trainer,
    )
    from trlx_like.models import (
        AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
        create_reference_model as create_reference_model,
    )
    from trlx_like.models.diffusion_families import (
        register_diffusion_family as register_diffusion_family,
    )
    from trlx_like.pipelines.prompts import (
        register_datapipeline as register_datapipeline,
    )
    from trlx_like.presets import (
        default_ddpo_config as default_ddpo_config,
        default_dpo_config as default_dpo_config,
        default_grpo_config as default_grpo_config,
        default_ilql_config as default_ilql_config,
        default_online_dpo_config as default_online_dpo_config,
        default_ppo_config as default_ppo_config,
        default_reward_config as default_reward_config,
        default_rft_config as default_rft_config,
        default_rloo_config as default_rloo_config,
        default_sft_config as default_sft_config,
    )
    from trlx_like.rewards.judges import (
        WinRate as WinRate,
        register_judge as register_judge,
    )
    from trlx_like.rewards.models import (
        RewardModel as RewardModel,
    )
    from trlx_like.rewards.weighted import (
        WeightedRewards as WeightedRewards,
    )
    from trlx_like.samplers.guided import (
        AutoModelForCausalLMWithILQLHeads as AutoModelForCausalLMWithILQLHeads,
        AutoModelForSeq2SeqLMWithILQLHeads as AutoModelForSeq2SeqLMWithILQLHeads,
    )
    from trlx_like.tracking import (
        register_tracker as register_tracker,
    )
    from trlx_like.trainers.base import (
        BaseRLTrainer as BaseRLTrainer,
        LossOutput as LossOutput,
    )
    from trlx_like.trainers.callbacks import (
        Callback as Callback,
    )
    from trlx_like.trainers.ddpo import (
        DDPOTrainer as DDPOTrainer,
    )
    from trlx_like.trainers.dpo import (
        DPOTrainer as DPOTrainer,
    )
    from trlx_like.trainers.grpo import (
        GRPOTrainer as GRPOTrainer,
    )
    from trlx_like.trainers.ilql import (
        ILQLTrainer as ILQLTrainer,
    )
    from trlx_like.trainers.online import (
        OnlineTextTrainer as OnlineTextTrainer,
    )
    from trlx_like.trainers.online_dpo import (
        OnlineDPOTrainer as OnlineDPOTrainer,
    )
    from trlx_like.trainers.ppo import (
        PPOTrainer as PPOTrainer,
    )
    from trlx_like.trainers.reward import (
        RewardTrainer as RewardTrainer,
    )
    from trlx_like.trainers.rft import (
        RFTTrainer as RFTTrainer,
    )
    from trlx_like.trainers.rloo import (
        RLOOTrainer as RLOOTrainer,
    )
    from trlx_like.trainers.sft import (
        SFTTrainer as SFTTrainer,
    )
    from trlx_like.trainers.text import (
        TextTrainer as TextTrainer,
    )

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
    "DDPOConfig": "config",
    "DPOConfig": "config",
    "GRPOConfig": "config",
    "ILQLConfig": "config",
    "OnlineDPOConfig": "config",
    "PPOConfig": "config",
    "RFTConfig": "config",
    "RLOOConfig": "config",
    "SFTConfig": "config",
    "RewardConfig": "config",
    "RewardFnConfig": "config",
    "register_method": "config",
    "register_trainer": "config",
    "register_datapipeline": "pipelines.prompts",
    "register_tracker": "tracking",
    "register_judge": "rewards.judges",
    "register_diffusion_family": "models.diffusion_families",
    "WinRate": "rewards.judges",
    "RewardModel": "rewards.models",
    "WeightedRewards": "rewards.weighted",
    "default_ddpo_config": "presets",
    "default_dpo_config": "presets",
    "default_grpo_config": "presets",
    "default_ilql_config": "presets",
    "default_online_dpo_config": "presets",
    "default_ppo_config": "presets",
    "default_rft_config": "presets",
    "default_rloo_config": "presets",
    "default_sft_config": "presets",
    "default_reward_config": "presets",
    "BaseRLTrainer": "trainers.base",
    "TextTrainer": "trainers.text",
    "OnlineTextTrainer": "trainers.online",
    "LossOutput": "trainers.base",
    "Callback": "trainers.callbacks",
    "DDPOTrainer": "trainers.ddpo",
    "DPOTrainer": "trainers.dpo",
    "GRPOTrainer": "trainers.grpo",
    "ILQLTrainer": "trainers.ilql",
    "OnlineDPOTrainer": "trainers.online_dpo",
    "PPOTrainer": "trainers.ppo",
    "RFTTrainer": "trainers.rft",
    "RLOOTrainer": "trainers.rloo",
    "SFTTrainer": "trainers.sft",
    "RewardTrainer": "trainers.reward",
    "AutoModelForCausalLMWithILQLHeads": "samplers.guided",
    "AutoModelForSeq2SeqLMWithILQLHeads": "samplers.guided",
    "AutoModelForCausalLMWithValueHead": "models",
    "AutoModelForSeq2SeqLMWithValueHead": "models",
    "create_reference_model": "models",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'trlx_like' has no attribute {name!r}")
    return getattr(import_module(f"trlx_like.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
