"""What is compared: each trainer of a peer with the recipe of its own side, and with the values of ours.

The values of our recipes were chosen on graphs 3, 44, 2007, 2008 and 2010, and those of PPO on graph 5004 too, the only
one of the graphs that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WALKS = 4800
"""The walks that a trainer may sample and score."""
LONGEST = 10
"""The nodes of a walk after the first, and the token that ends it, at most."""


@dataclass(frozen=True)
class Recipe:
    """Describe one line of the comparison.

    Args:
        method: The method, by the name of our configuration.
        library: Whose trainer.
        program: The module of `benchmarks.learning` that trains.
        environment: The environment of a peer; None for that of this project.
        values: Where the hyperparameters come from, in words.
        options: The hyperparameters, by the names of the library.
    """

    method: str
    library: str
    program: str
    environment: str | None
    values: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the name of the line in tables and pictures."""
        return f"{self.library}, {self.values}" if self.environment else self.library


ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
"""Of Adam: the values of trlX, which are the defaults of this project."""
# 1.16: an optimizer step takes 96 walks of a round of 192, which are learned from twice. The rate falls linearly.
GROUPS: dict[str, Any] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"lr_end": 5e-5, "power": 1.0},
    "adam_beta2": 0.95,
    "weight_decay": 1e-6,
    "per_device_train_batch_size": 96,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "num_generations": 16,
    "beta": 0.0,
    "temperature": 1.2,
}
RATE = {name: GROUPS[name] for name in ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")}


def _ours(method: str) -> Recipe:
    return Recipe(method, "trlx_like", "ours", None, f"configs/{method}_randomwalks.yml")


def _ppo(values: str, **options: Any) -> Recipe:
    return Recipe("ppo", "TRL 0.11.4", "trl_0_11", "trl_0_11", values, options)


def _groups(method: str, values: str, **options: Any) -> Recipe:
    return Recipe(method, "TRL 1.16.0", "trl_1_16", "trl_1_16", values, options)


RECIPES = {
    "ppo": _ours("ppo"),
    "ppo trl": _ppo(
        "our values",
        learning_rate=5e-4,
        final_rate=5e-5,
        adam=ADAM,
        batch_size=192,
        mini_batch_size=96,
        ppo_epochs=2,
        adap_kl_ctrl=False,
        init_kl_coef=0.0,
        lam=1.0,
        vf_coef=1.0,
        max_grad_norm=1.0,
    ),
    # Its mini-batches of 100 do not divide a round of 128: trlX makes two of each round, and so does this.
    "ppo trl, trlX": _ppo(
        "trlX's recipe",
        learning_rate=3e-4,
        final_rate=3e-4,
        adam=ADAM,
        batch_size=128,
        mini_batch_size=64,
        ppo_epochs=4,
        adap_kl_ctrl=False,
        init_kl_coef=0.0,
        lam=0.95,
        vf_coef=1.2,
    ),
    "grpo": _ours("grpo"),
    "grpo trl": _groups("grpo", "our values", **GROUPS),
    "grpo trl, rate": _groups("grpo", "its defaults at our learning rate", **RATE),
    "rloo": _ours("rloo"),
    "rloo trl": _groups("rloo", "our values", **GROUPS),
    "rloo trl, rate": _groups("rloo", "its defaults at our learning rate", **RATE),
    "ppo trl, defaults": _ppo("its defaults"),
    "grpo trl, defaults": _groups("grpo", "its defaults"),
    "rloo trl, defaults": _groups("rloo", "its defaults"),
}
