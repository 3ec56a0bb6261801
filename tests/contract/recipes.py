"""How to make a tiny instance of every registered trainer. A new trainer costs one entry in `RECIPES`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.contract import images
from tests.tiny import tiny_config, tiny_lm, tiny_tokenizer
from trlx_like import TRLConfig
from trlx_like.api import make_trainer
from trlx_like.config import TRAINERS
from trlx_like.testing import TrainerChecks
from trlx_like.testing.tiny import (
    GENERATION as GENERATION,
    NO_DROPOUT as NO_DROPOUT,
    PROMPTS as PROMPTS,
    count_letters as count_letters,
    tiny_run,
)

# Toys are faster on one thread, and a process that has started no others can be forked into ranks.
torch.set_num_threads(1)


GENERATED = "generation/length"
"""What evaluations report that generate text, which a metric_fn can measure."""


@dataclass(frozen=True)
class Recipe:
    """Enough for two rounds of several passes whose last batches are partial, on data of different lengths.

    method: the section `method`. train: options of `train` beside the common ones. arguments: of `make_trainer`.
    loads_as: the class of transformers that loads the export. evaluated: a metric of every evaluation.
    variants: further runs that must resume bitwise, as changes to the configuration with dotted keys; an argument of
    `make_trainer` may be among them.
    """

    method: dict[str, Any]
    train: dict[str, Any]
    arguments: dict[str, Any]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads_as: Any = AutoModelForCausalLM  # None: the export is for other tests to load
    model: dict[str, Any] | None = None  # the section `model`, where it is no tiny language model
    evaluated: str = GENERATED


def weigh_letters(outputs: Sequence[str], weight: Sequence[float], **_: Any) -> list[float]:
    """The same with a weight that came with the prompt."""
    return [w * reward for w, reward in zip(weight, count_letters(outputs), strict=True)]


def lengths(outputs: Sequence[str], **_: Any) -> dict[str, list[float]]:
    return {"length": [float(len(output)) for output in outputs]}


class Longest:
    """A judge that compares by length."""

    def compare(self, pairs: Sequence[tuple[str, str]], **_: Any) -> list[int | None]:
        return [None if len(a) == len(b) else int(len(a) < len(b)) for a, b in pairs]


GROUPS = {"num_generations": 3, "num_prompts": 2, "chunk_size": 1, "num_iterations": 2, "gen_kwargs": GENERATION}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 64}
SEQ2SEQ = {
    "model.model_path": tiny_config("t5", dropout_rate=0.0),
    "model.model_arch_type": "seq2seq",
    "tokenizer.tokenizer_path": tiny_tokenizer(ends=True),
}

PAIRS = [
    ("the cat", " sat.", " at a mat"),
    {"chosen": "abcdef", "rejected": "abzz", "margin": 0.5},
    ("ab", "cd", "e"),
    ("zz", "aaaa top", "b"),
    {"prompt": "dog", "chosen": "a", "rejected": "bcd", "margin": -0.25},
]

PREFERENCES = [
    {"prompt": "ab", "chosen": " cd", "rejected": "e"},
    ("the cat", " sat.", " flew away"),
    {"chosen": "zz top.", "rejected": "zz bottom"},
    ("b", "bcd", "efghijk"),
    ("abcdefg", "h", "x y z"),
]

RECIPES = {
    "DDPOTrainer": Recipe(**images.DDPO, loads_as=None, evaluated="reward/mean"),
    "DPOTrainer": Recipe(
        method={"name": "DPOConfig", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.5}
        | {"gen_kwargs": GENERATION},
        train={"epochs": 3, "total_steps": 100},
        arguments={"preferences": PREFERENCES, "eval_prompts": PROMPTS[:3], "reward_fn": count_letters},
        variants={
            "adapter": {"model.peft_config": LORA, "method.precompute_ref_log_probs": False},
            "moving reference": {
                "train.async_save": True,
                "method.sync_ref_model": True,
                "method.ref_model_sync_steps": 2,
                "method.disable_dropout": False,
                "model.model_path": tiny_config(),
                "train.eval_interval": 2,
                "method.generate_during_eval": True,
            },
            "moving top": {
                "method.sync_ref_model": True,
                "method.ref_model_sync_steps": 1,
                "method.loss_type": "ipo",
                "method.loss_weights": None,
                "model.num_layers_unfrozen": 1,
                "eval_preferences": PREFERENCES[:3],
                "train.eval_interval": 3,
            },
            "seq2seq": {
                **SEQ2SEQ,
                "preferences": [row for row in PREFERENCES if len(row) == 3],
                "model.num_layers_unfrozen": 1,
                "method.precompute_ref_log_probs": False,
                "train.epochs": 5,
            },
            "held out": {
                "eval_preferences": {"a": PREFERENCES[:2], "b": PREFERENCES[2:3]},
                "train.eval_interval": 2,
            },
            "frozen reference": {
                "method.precompute_ref_log_probs": False,
                "method.loss_type": ["exo_pair", "apo_zero"],
                "method.label_smoothing": 0.1,
                "method.use_weighting": True,
                "method.rpo_alpha": 0.5,
                "model.num_layers_unfrozen": 1,
            },
            "sorted": {
                "method.loss_type": ["aot", "bco_pair"],
                "method.reference_free": True,
                "method.ld_alpha": 0.5,
                "train.eval_interval": 2,
                "method.generate_during_eval": True,
                "method.gen_kwargs": {**GENERATION, "temperature": [0.5, 1.0]},
            },
        },
    ),
    "DistillTrainer": Recipe(
        method={"name": "DistillConfig", "num_rollouts": 7, "chunk_size": 3, "gen_kwargs": GENERATION},
        model={"model_path": tiny_config(**NO_DROPOUT), "ref_model_path": tiny_lm(seed=5, layers=1)},
        train={"epochs": 3, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "cut": {
                "method.divergence": "jsd",
                "method.beta": 0.25,
                "method.loss_temperature": 2.0,
                "method.gen_kwargs": {**GENERATION, "top_k": 5},
                "method.disable_dropout": False,
                "model.model_path": tiny_config(),
                "train.eval_interval": 2,
                "reward_fn": None,
                "eval_prompts": PROMPTS[:3],
            },
            "adapter": {"model.peft_config": LORA, "method.divergence": "forward_kl"},
            "seq2seq": {
                **SEQ2SEQ,
                "model.num_layers_unfrozen": 1,
                "model.ref_model_path": tiny_lm("t5", seed=5, dropout_rate=0.0),
            },
        },
    ),
    "GRPOTrainer": Recipe(
        method={"name": "GRPOConfig", **GROUPS, "scale_rewards": "none", "beta": 0.1},
        train={"batch_size": 4, "epochs": 2, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "dynamic": {
                "train.async_save": True,
                "train.total_steps": 6,
                "train.epochs": 100,
                "train.eval_interval": 2,
                "method.max_sampling_attempts": 3,
                "method.mask_truncated_completions": True,
                "method.soft_punish_cache": 3,
                "method.importance_sampling_level": "sequence",
                "method.loss_type": "grpo",
                "method.scale_rewards": "group",
                "method.epsilon_high": 0.3,
                "method.beta": 0.0,
                "method.gen_kwargs": {**GENERATION, "top_k": 20, "min_p": 0.01},
                "prompts": [{"prompt": text, "weight": len(text)} for text in PROMPTS],
                "reward_fn": weigh_letters,
            },
            "adapter": {
                "model.peft_config": LORA,
                "method.scale_rewards": "batch",
                "method.loss_type": "dr_grpo",
                "method.credit": "prefix",
                "method.max_at_k": 2,
                "method.max_at_k_steps": 3,
                "method.replay_best": True,
                "train.epochs": 3,
            },
            "seq2seq": {**SEQ2SEQ, "model.num_layers_unfrozen": 1, "method.kl_in": "reward"},
        },
    ),
    "ILQLTrainer": Recipe(
        method={
            "name": "ILQLConfig",
            "steps_for_target_q_sync": 2,
            "alpha": 0.3,
            "beta": 0.5,
            "gen_kwargs": {**GENERATION, "beta": 2.0, "top_k": 5},
        },
        train={"epochs": 3, "total_steps": 100},
        arguments={
            "samples": ["ab cd", ("the cat", " sat."), "a", ("b", "bcd", "e", "efghijk"), "zz top."],
            "rewards": [1.0, -0.5, 0.0, 2.0, 0.3],
            "eval_prompts": PROMPTS[:3],
            "reward_fn": count_letters,
        },
        variants={
            "dense": {
                "method.standardize_rewards": False,
                "method.two_qs": False,
                "method.awac_per": "token",
                "method.mc_returns": True,
                "method.gen_kwargs": {**GENERATION, "beta": [0, 4]},
                "train.eval_interval": 2,
                "train.total_steps": 5,
                "rewards": [[0.1] * 5, -0.5, 0.0, [1.0, 2.0], 0.3],
            },
            "adapter": {"model.peft_config": LORA},
            "seq2seq": {
                **SEQ2SEQ,
                "model.num_layers_unfrozen": 1,
                "train.total_steps": 5,
                "samples": [("ab", "cd"), ("the cat", " sat."), ("a", "b"), ("b", "bcd"), ("zz", "top.")],
            },
        },
    ),
    "KTOTrainer": Recipe(
        method={"name": "KTOConfig", "beta": 0.5, "desirable_weight": 0.75, "gen_kwargs": GENERATION},
        train={"epochs": 3, "total_steps": 100},
        arguments={
            "samples": [
                {"prompt": "ab", "completion": " cd"},
                ("the cat", " sat."),
                ("b", "bcd", "e", "efghijk"),
                ("abcdefg", "h"),
                ("zz", " bottom"),
            ],
            "rewards": [True, False, True, True, False],
            "eval_prompts": PROMPTS[:3],
            "reward_fn": count_letters,
        },
        variants={
            "adapter": {
                "model.peft_config": LORA,
                "method.undesirable_weight": 0.5,
                "method.precompute_ref_log_probs": True,
                "eval_samples": [{"prompt": "ab", "completion": " dog", "label": True}],
            },
            "dropout": {"model.model_path": tiny_config(), "method.disable_dropout": False, "train.eval_interval": 2},
            "top": {"model.num_layers_unfrozen": 1, "method.loss_type": "apo_zero_unpaired"},
            "seq2seq": {
                **SEQ2SEQ,
                "model.num_layers_unfrozen": 1,
                "samples": [("ab", " cd"), ("the cat", " sat."), ("b", "a"), ("ef", "g"), ("zz", "p.")],
            },
        },
    ),
    "OnlineDPOTrainer": Recipe(
        method={"name": "OnlineDPOConfig", "beta": 0.5, "num_prompts": 7, "chunk_size": 3, "gen_kwargs": GENERATION}
        | {"n_generations_per_prompt": 3},
        train={"epochs": 3, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "judged": {
                "method.n_generations_per_prompt": 4,
                "method.loss_type": "ipo",
                "method.beta": [0.5, 0.25],
                "method.missing_eos_penalty": 0.5,
                "method.gen_kwargs": {**GENERATION, "min_p": 0.5},
                "method.disable_dropout": False,
                "model.model_path": tiny_config(),
                "model.num_layers_unfrozen": 1,
                "train.eval_interval": 2,
                "judge": Longest(),
                "reward_fn": None,
                "eval_prompts": [{"prompt": text, "reference": "abc"} for text in PROMPTS[:3]],
            },
            "adapter": {"model.peft_config": LORA, "train.eval_interval": 3, "method.replay_best": True},
            "seq2seq": {**SEQ2SEQ, "model.num_layers_unfrozen": 1},
        },
    ),
    "PPOTrainer": Recipe(
        method={
            "name": "PPOConfig",
            "num_rollouts": 5,
            "chunk_size": 3,
            "ppo_epochs": 2,
            "init_kl_coef": 0.1,
            "gen_kwargs": GENERATION,
        },
        train={"epochs": 2, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "controlled": {
                "train.eval_interval": 3,
                "train.async_save": True,
                "train.total_steps": 7,
                "train.epochs": 100,
                "model.num_layers_unfrozen": 1,
                "method.target": 0.01,
                "method.horizon": 20,
                "method.target_kl": 0.001,
                "method.scale_reward": "running",
                "method.norm_reward": True,
                "prompts": [{"prompt": text, "weight": len(text)} for text in PROMPTS],
                "reward_fn": weigh_letters,
            },
            "adapter": {
                "model.peft_config": LORA,
                "train.eval_interval": 3,
                "train.total_steps": 6,
                "method.init_kl_coef": 1.0,
                "method.replay_best": True,
                "method.num_rollouts": 8,
                "sampler.engine": "copy",
            },
            "reference scale": {
                "train.total_steps": 6,
                "train.eval_interval": 2,
                "method.scale_reward": "ref",
                "method.num_value_layers_unfrozen": 1,
                "method.kl_in": "loss",
                "method.ent_coef": 0.1,
                "method.gen_kwargs": {**GENERATION, "top_p": 0.8},
            },
            "seq2seq": {**SEQ2SEQ, "model.num_layers_unfrozen": 1, "method.num_value_layers_unfrozen": 1},
        },
    ),
    "RFTTrainer": Recipe(
        method={
            "name": "RFTConfig",
            "n_generations_per_prompt": 3,
            "n_improve_steps": 2,
            "start_percentile": 0.3,
            "end_percentile": 0.9,
            "chunk_size": 7,
            "gen_kwargs": GENERATION,
        },
        train={"epochs": 3, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "small pool": {
                "model.model_path": tiny_config(),
                "model.num_layers_unfrozen": 1,
                "method.pool_size": 4,
                "method.gen_experience_kwargs": {**GENERATION, "top_k": 20},
                "train.total_steps": 8,
                "train.epochs": 100,
                "train.eval_interval": 3,
                "prompts": [{"prompt": text, "weight": len(text)} for text in PROMPTS],
                "reward_fn": weigh_letters,
            },
            "seq2seq": SEQ2SEQ,
        },
    ),
    "RLOOTrainer": Recipe(
        method={"name": "RLOOConfig", **GROUPS, "beta": 0.1, "loss_type": "dapo"},
        train={"batch_size": 4, "epochs": 2, "total_steps": 100},
        arguments={"prompts": PROMPTS, "reward_fn": count_letters, "metric_fn": lengths},
        variants={
            "whitened": {
                "method.baseline": "batch",
                "method.num_generations": 1,
                "method.num_prompts": 6,
                "method.gen_kwargs": {**GENERATION, "top_k": 9},
            },
            "seq2seq": {**SEQ2SEQ, "method.kl_in": "loss", "method.loss_type": "grpo"},
        },
    ),
    "RewardTrainer": Recipe(
        method={"name": "RewardConfig", "center_rewards_coefficient": 0.1},
        train={"epochs": 3, "total_steps": 100, "best_metric": "eval/rewards/margins"},
        arguments={"preferences": PAIRS, "eval_preferences": PAIRS[:3]},
        variants={
            "dropout": {
                "model.model_path": tiny_config(),
                "method.disable_dropout": False,
                "train.eval_interval": 2,
                "train.total_steps": 5,
            },
            "top": {"model.num_layers_unfrozen": 1, "train.seq_length": 8, "method.too_long": "truncate"},
            "adapter": {"model.peft_config": LORA},
        },
        loads_as=AutoModelForSequenceClassification,
        evaluated="eval/rewards/margins",
    ),
    "SFTTrainer": Recipe(
        method={"name": "SFTConfig", "gen_kwargs": GENERATION},
        train={"epochs": 3, "total_steps": 100},
        arguments={
            "samples": ["ab cd", ("the cat", " sat."), "a", ("b", "bcd", "e", "efghijk"), "zz top."],
            "eval_prompts": PROMPTS[:3],
            "reward_fn": count_letters,
        },
        variants={
            "dropout": {"model.model_path": tiny_config(), "train.eval_interval": 2, "train.total_steps": 5}
            | {"train.async_save": True},
            "adapter": {"model.peft_config": {**LORA, "lora_dropout": 0.1}, "train.total_steps": 5},
            "noise": {"method.neftune_noise_alpha": 5.0, "train.total_steps": 4},
            "packed": {"method.packing": True, "train.batch_size": 2, "train.minibatch_size": 1, "train.epochs": 4},
            "seq2seq": {
                **SEQ2SEQ,
                "samples": [("ab", " cd"), ("the cat", " sat."), ("b", "a"), ("ef", ""), ("zz", "p.")],
            },
        },
    ),
}


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The tiny trainer of that name, its run in `folder`; changes as of `ingredients`."""
    config, arguments = ingredients(name, folder, **changes)
    return make_trainer(config, **arguments)


def ingredients(name: str, folder: Path, **changes: Any) -> tuple[TRLConfig, dict[str, Any]]:
    """What the tiny trainer of that name is made of: its configuration, and further arguments of `make_trainer`.

    changes: dotted keys of the configuration ("train.seed"), and arguments of `make_trainer`.
    """
    recipe = RECIPES[name]
    options = {key: value for key, value in changes.items() if "." in key}
    arguments = {key: value for key, value in changes.items() if "." not in key}
    train = {"trainer": name, "checkpoint_dir": str(folder), **recipe.train}
    config = tiny_run(TRAINERS.get(name), recipe.method, **{"model": recipe.model or {}, "train": train, **options})
    return config, {**recipe.arguments, **arguments}


def checks(name: str, **changes: Any) -> TrainerChecks:
    """The checks of the tiny trainer of that name; changes as of `ingredients`."""
    config, arguments = ingredients(name, Path("unused"), **changes)
    return TrainerChecks(TRAINERS.get(name), config, **arguments)


def kinds() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Every recipe as it is, and on an encoder-decoder where there is such a variant; as `scenarios`."""
    found = scenarios()
    return {key: value for key, value in found.items() if key in RECIPES or key.endswith("-seq2seq")}


ONE_PROCESS = {"DPOTrainer-sorted": "sorts the whole batch, which several processes do not have in one place"}
"""Scenarios that several processes refuse, with the reason."""


OF_THEIR_OWN = (
    *(
        "DDPOTrainer-sd3",
        "DPOTrainer-moving reference",
        "DPOTrainer-sorted",
        "GRPOTrainer-dynamic",
        "KTOTrainer-dropout",
    ),
    *("OnlineDPOTrainer-judged", "PPOTrainer-controlled", "PPOTrainer-seq2seq", "RFTTrainer-small pool"),
    *("RewardTrainer-adapter", "SFTTrainer-noise", "SFTTrainer-packed"),
)
"""Variants that keep something of their own between steps: what moves, is drawn, or is counted."""


def few(cases: Iterable[str], kept: Collection[str] = ("DDPOTrainer", "DPOTrainer", "PPOTrainer")) -> list[Any]:
    """Cases of which all but a few are marked slow; by default those of images, of pairs and of rollouts are kept."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def scenarios() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Every recipe as it is and in all its variants: a name, the trainer's name, the changes."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, recipe in RECIPES.items():
        found[name] = (name, {})
        found |= {f"{name}-{variant}": (name, changes) for variant, changes in recipe.variants.items()}
    return found
