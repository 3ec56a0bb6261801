"""The algorithms of the package, one row each.

Whatever lists algorithms reads this table: the registries of methods and trainers, the presets, the names of
`trlx_like`, the command line and the tests. To add an algorithm, write its files (`config/methods/NAME.py`,
`trainers/NAME.py` and `docs/algorithms/NAME.md`), add its row here and run `scripts/exports.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMDB = "lvwerra/gpt2-imdb"
KL_WEIGHT = 0.05
"""KL weight of presets in standard deviations of the scores per nat: PPO, GRPO and RLOO divide scores by theirs."""


@dataclass(frozen=True)
class Algorithm:
    """Describe one algorithm: where its parts are, and the configuration to start from."""

    prefix: str
    """Beginning of the names of its classes: `OnlineDPO` for `OnlineDPOConfig` and `OnlineDPOTrainer`."""
    summary: str
    """Docstring of its preset."""
    preset: Mapping[str, Mapping[str, Any]]
    """Options of its preset by section; those that are left out have their defaults."""
    aliases: tuple[str, ...] = ()
    """Other names of its trainer, such as that of trlX."""

    @property
    def name(self) -> str:
        """Name of its preset and of its files, such as `online_dpo`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.prefix).lower()

    @property
    def method(self) -> str:
        """Name of its configuration class, such as `PPOConfig`."""
        return f"{self.prefix}Config"

    @property
    def trainer(self) -> str:
        """Name of its trainer class, such as `PPOTrainer`."""
        return f"{self.prefix}Trainer"

    @property
    def default(self) -> str:
        """Name of the function that makes its preset."""
        return f"default_{self.name}_config"

    @property
    def exports(self) -> dict[str, str]:
        """Its public names, each with its module within the package."""
        return {
            self.method: f"config.methods.{self.name}",
            self.trainer: f"trainers.{self.name}",
            self.default: "presets",
        }


def _text(path: str, lr: float | str, **train: Any) -> dict[str, dict[str, Any]]:
    """Return a preset for a language model, with the optimizer and scheduler of trlX."""
    adam = {"lr": lr, "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    common = {"seq_length": "auto", "epochs": 100, "checkpoint_interval": 10000, "eval_interval": 100}
    return {
        "model": {"model_path": path},
        "optimizer": {"name": "adamw", "kwargs": adam},
        # trlX's way to write a constant rate: it would fall to eta_min over 1e12 steps.
        "scheduler": {"name": "cosine_annealing", "kwargs": {"T_max": 1e12, "eta_min": 0.0 if lr == "auto" else lr}},
        "train": {**common, **train},
    }


_DDPO: dict[str, dict[str, Any]] = {
    "model": {
        "model_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "model_arch_type": "diffusion",
        "peft_config": {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"},
    },
    "optimizer": {
        "name": "adamw",
        "kwargs": {"lr": 3.0e-4, "betas": [0.9, 0.999], "eps": 1.0e-8, "weight_decay": 1.0e-4},
    },
    "train": {"total_steps": 400, "epochs": 100, "batch_size": 64, "minibatch_size": 8},
    "backend": {"mixed_precision": "bf16", "gradient_checkpointing": True},
}

ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(
        "PPO",
        "Return the preset for PPO on a GPT-2 of film reviews: trlX's values but for rate, KL weight and layers.",
        _text(IMDB, "auto", total_steps=10000, batch_size=32)
        | {"method": {"scale_reward": "running", "init_kl_coef": KL_WEIGHT}},
        aliases=("AcceleratePPOTrainer",),
    ),
    Algorithm(
        "GRPO",
        "Return the preset for GRPO, on a GPT-2 that was fine-tuned on film reviews.",
        _text(IMDB, "auto", total_steps=1000, batch_size=128) | {"method": {"beta": KL_WEIGHT, "kl_in": "reward"}},
    ),
    Algorithm(
        "RLOO",
        "Return the preset for RLOO, on a GPT-2 that was fine-tuned on film reviews.",
        _text(IMDB, "auto", total_steps=1000, batch_size=128)
        | {"method": {"beta": KL_WEIGHT, "scale_rewards": "batch"}},
    ),
    Algorithm(
        "RFT",
        "Return the preset for rejection-sampling fine-tuning of a GPT-2 that was fine-tuned on film reviews.",
        _text(IMDB, "auto", total_steps=1000, batch_size=32) | {"method": {"n_generations_per_prompt": "auto"}},
        aliases=("AccelerateRFTTrainer",),
    ),
    Algorithm(
        "ILQL",
        "Return the preset for ILQL: trlX's values, on GPT-2.",
        _text("gpt2", 5.0e-5, total_steps=1000, batch_size=128, seq_length=64),
        aliases=("AccelerateILQLTrainer",),
    ),
    Algorithm(
        "SFT",
        "Return the preset for supervised fine-tuning of GPT-2, with trlX's values.",
        _text("gpt2", 1.0e-4, total_steps=1000, batch_size=8),
        aliases=("AccelerateSFTTrainer",),
    ),
    Algorithm(
        "Reward",
        "Return the preset for a reward model on GPT-2, with TRL's learning rate and batch size.",
        _text("gpt2", 1.0e-4, total_steps=1000, batch_size=8),
    ),
    Algorithm(
        "DPO",
        "Return the preset for DPO on GPT-2, with TRL's learning rate, batch size and epochs.",
        _text("gpt2", 1.0e-6, total_steps=10000, batch_size=8, epochs=3),
    ),
    Algorithm(
        "KTO",
        "Return the preset for KTO on GPT-2, with TRL's learning rate, batch size and epochs.",
        _text("gpt2", 1.0e-6, total_steps=10000, batch_size=8, epochs=3),
    ),
    Algorithm(
        "OnlineDPO",
        "Return the preset for Online DPO on GPT-2: TRL's lengths, the best and the worst of eight responses.",
        _text("gpt2", "auto", total_steps=10000, epochs=10000, batch_size=16)
        | {"method": {"n_generations_per_prompt": 8, "beta": 0.5}}
        | {"tokenizer": {"truncation_side": "left"}},  # a prompt that is too long keeps its end
    ),
    Algorithm(
        "Distill",
        "Return the preset for distilling GPT-2 large into GPT-2 on the small model's own responses.",
        _text("gpt2", 1.0e-5, total_steps=1000, batch_size=32)
        | {"model": {"model_path": "gpt2", "ref_model_path": "gpt2-large"}},
    ),
    Algorithm(
        "DDPO",
        "Return the preset for DDPO with LoRA on Stable Diffusion 1.5, with its authors' values for compressibility.",
        _DDPO,
    ),
)
