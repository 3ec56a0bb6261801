"""Complete configurations to start from, with trlX's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trlx_like.config import (
    BackendConfig,
    DDPOConfig,
    DPOConfig,
    GRPOConfig,
    ILQLConfig,
    MethodConfig,
    ModelConfig,
    OnlineDPOConfig,
    OptimizerConfig,
    PPOConfig,
    RewardConfig,
    RFTConfig,
    RLOOConfig,
    SchedulerConfig,
    SFTConfig,
    TrainConfig,
    TRLConfig,
)
from trlx_like.errors import ConfigError


def default_ppo_config() -> TRLConfig:
    """PPO on a GPT-2 that was tuned on film reviews."""
    return _preset(
        PPOConfig(),
        ModelConfig(model_path="lvwerra/gpt2-imdb", num_layers_unfrozen=2),
        lr=3.0e-5,
        train={"trainer": "PPOTrainer", "total_steps": 10000, "batch_size": 32},
    )


def default_ddpo_config() -> TRLConfig:
    """DDPO with a LoRA on Stable Diffusion 1.5, with the values of its authors' runs on compressibility."""
    adam = {"lr": 3.0e-4, "betas": [0.9, 0.999], "eps": 1.0e-8, "weight_decay": 1.0e-4}
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"}
    path = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    return TRLConfig(
        method=DDPOConfig(),
        model=ModelConfig(model_path=path, model_arch_type="diffusion", peft_config=lora),
        optimizer=OptimizerConfig(name="adamw", kwargs=adam),
        train=TrainConfig(trainer="DDPOTrainer", total_steps=400, epochs=100, batch_size=64, minibatch_size=8),
        backend=BackendConfig(mixed_precision="bf16", gradient_checkpointing=True),
    )


def default_rft_config() -> TRLConfig:
    """Rejection-sampling fine-tuning of a GPT-2 that was tuned on film reviews."""
    return _preset(
        RFTConfig(),
        ModelConfig(model_path="lvwerra/gpt2-imdb"),
        lr=3.0e-5,
        train={"trainer": "RFTTrainer", "total_steps": 1000, "batch_size": 32},
    )


def default_grpo_config() -> TRLConfig:
    """GRPO on a GPT-2 that was tuned on film reviews, with the rate of TRL."""
    return _preset(
        GRPOConfig(),
        ModelConfig(model_path="lvwerra/gpt2-imdb"),
        lr=1.0e-6,
        train={"trainer": "GRPOTrainer", "total_steps": 1000, "batch_size": 128},
    )


def default_rloo_config() -> TRLConfig:
    """RLOO on a GPT-2 that was tuned on film reviews, with the rate of TRL."""
    return _preset(
        RLOOConfig(),
        ModelConfig(model_path="lvwerra/gpt2-imdb"),
        lr=1.0e-6,
        train={"trainer": "RLOOTrainer", "total_steps": 1000, "batch_size": 128},
    )


def default_ilql_config() -> TRLConfig:
    """ILQL on GPT-2."""
    return _preset(
        ILQLConfig(),
        ModelConfig(model_path="gpt2"),
        lr=5.0e-5,
        train={"trainer": "ILQLTrainer", "total_steps": 1000, "batch_size": 128, "seq_length": 64},
    )


def default_sft_config() -> TRLConfig:
    """Supervised fine-tuning of GPT-2."""
    return _preset(
        SFTConfig(),
        ModelConfig(model_path="gpt2"),
        lr=1.0e-4,
        train={"trainer": "SFTTrainer", "total_steps": 1000, "batch_size": 8},
    )


def default_reward_config() -> TRLConfig:
    """A reward model on GPT-2, with the rate and the batch size of TRL."""
    return _preset(
        RewardConfig(),
        ModelConfig(model_path="gpt2"),
        lr=1.0e-4,
        train={"trainer": "RewardTrainer", "total_steps": 1000, "batch_size": 8},
    )


def default_dpo_config() -> TRLConfig:
    """DPO on GPT-2, with the rate, batch size and epochs of TRL."""
    return _preset(
        DPOConfig(),
        ModelConfig(model_path="gpt2"),
        lr=1.0e-6,
        train={"trainer": "DPOTrainer", "total_steps": 10000, "batch_size": 8, "epochs": 3},
    )


def default_online_dpo_config() -> TRLConfig:
    """Online DPO on GPT-2, with the rate, batch size and lengths of TRL."""
    return _preset(
        OnlineDPOConfig(),
        ModelConfig(model_path="gpt2"),
        lr=5.0e-7,
        train={"trainer": "OnlineDPOTrainer", "total_steps": 10000, "epochs": 10000, "batch_size": 8}
        | {"seq_length": 512},
    )


def _preset(method: MethodConfig, model: ModelConfig, *, lr: float, train: dict[str, Any]) -> TRLConfig:
    adam = {"lr": lr, "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    return TRLConfig(
        method=method,
        model=model,
        tokenizer={"tokenizer_path": "gpt2"},
        optimizer=OptimizerConfig(name="adamw", kwargs=adam),
        # trlX's way to write a constant rate.
        scheduler=SchedulerConfig(name="cosine_annealing", kwargs={"T_max": 1e12, "eta_min": lr}),
        train=TrainConfig(
            **{"seq_length": 1024, "epochs": 100, "checkpoint_interval": 10000, "eval_interval": 100, **train}
        ),
    )


PRESETS: dict[str, Callable[[], TRLConfig]] = {
    "ddpo": default_ddpo_config,
    "dpo": default_dpo_config,
    "grpo": default_grpo_config,
    "ilql": default_ilql_config,
    "online_dpo": default_online_dpo_config,
    "ppo": default_ppo_config,
    "rft": default_rft_config,
    "rloo": default_rloo_config,
    "sft": default_sft_config,
    "reward": default_reward_config,
}


def preset_for(
    *,
    reward_fn: object = None,
    judge: object = None,
    samples: object = None,
    rewards: object = None,
    preferences: object = None,
) -> tuple[str, TRLConfig]:
    """The name and configuration of the preset that fits what `train` was given.

    Raises `ConfigError` if nothing says what to learn from, or two things do.
    """
    if judge is not None:
        if samples is not None or preferences is not None:
            raise ConfigError(
                "a judge fits Online DPO, which makes its own samples: leave samples and preferences out."
            )
        return "online_dpo", default_online_dpo_config()
    if rewards is not None and samples is None:
        raise ConfigError("rewards (for ILQL) need samples that they are of.")
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
