"""The configurations to start from."""

from __future__ import annotations

import pytest

from trlx_like.config.auto import AUTO
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.config.methods.dpo import DPOConfig
from trlx_like.config.methods.grpo import GRPOConfig
from trlx_like.config.methods.ilql import ILQLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.reward import RewardConfig
from trlx_like.config.methods.rft import RFTConfig
from trlx_like.config.methods.rloo import RLOOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.errors import ConfigError
from trlx_like.presets import (
    PRESETS,
    default_ddpo_config,
    default_dpo_config,
    default_grpo_config,
    default_ilql_config,
    default_online_dpo_config,
    default_ppo_config,
    default_reward_config,
    default_rft_config,
    default_rloo_config,
    default_sft_config,
    preset_for,
)


def test_ppo_has_the_values_of_trlx() -> None:
    """But for the rate and the positions, which follow from the model, the KL weight, and the trained layers."""
    config = default_ppo_config()
    train, method = config.train, config.method
    assert (train.seq_length, train.epochs, train.total_steps, train.batch_size) == (AUTO, 100, 10000, 32)
    assert (train.checkpoint_interval, train.eval_interval, train.trainer) == (10000, 100, "PPOTrainer")
    assert (config.model.model_path, config.model.num_layers_unfrozen) == ("lvwerra/gpt2-imdb", -1)
    assert config.optimizer.kwargs == {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
    assert config.scheduler.to_dict() == {
        "name": "cosine_annealing",
        "kwargs": {"T_max": 1e12, "eta_min": 0.0},
        "warmup": 0,
    }
    assert isinstance(method, PPOConfig)
    assert (method.num_rollouts, method.chunk_size, method.ppo_epochs) == (128, 128, 4)
    assert (method.init_kl_coef, method.target, method.horizon) == (0.05, None, 10000)
    assert (method.gamma, method.lam, method.cliprange, method.cliprange_value) == (1, 0.95, 0.2, 0.2)
    assert (method.vf_coef, method.scale_reward, method.cliprange_reward) == (1, "running", 10)
    assert method.gen_kwargs == {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}


def test_ddpo_has_the_values_of_its_authors() -> None:
    """config/dgx.py of ddpo-pytorch: 256 images a round, 4 updates of 64, 50 steps, guidance 5, 16 and 16."""
    config = default_ddpo_config()
    train, method = config.train, config.method
    assert (train.batch_size, train.epochs, train.total_steps, train.trainer) == (64, 100, 400, "DDPOTrainer")
    assert config.model.model_arch_type == "diffusion"
    assert config.optimizer.kwargs == {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-4}
    assert isinstance(method, DDPOConfig)
    assert (method.num_samples, method.num_inference_steps, method.eta, method.guidance_scale) == (256, 50, 1, 5)
    assert (method.cliprange, method.adv_clip, method.inner_epochs, method.timestep_fraction) == (1e-4, 5, 1, 1)
    assert (method.stat_buffer_size, method.stat_min_count, method.train_cfg) == (16, 16, True)


def test_sft_has_the_values_of_trlx() -> None:
    config = default_sft_config()
    train = config.train
    assert (train.seq_length, train.epochs, train.total_steps, train.batch_size) == (AUTO, 100, 1000, 8)
    assert (config.model.model_path, config.model.num_layers_unfrozen) == ("gpt2", -1)
    assert config.optimizer.kwargs["lr"] == config.scheduler.kwargs["eta_min"] == 1e-4
    assert isinstance(config.method, SFTConfig)


def test_rft_has_the_options_of_trlx() -> None:
    config = default_rft_config()
    method = config.method
    assert isinstance(method, RFTConfig)
    assert (method.start_percentile, method.end_percentile, method.n_improve_steps) == (0.7, 0.95, 4)
    assert (method.n_generations_per_prompt, method.pool_size) == (AUTO, None)
    assert (config.train.trainer, config.model.model_path) == ("RFTTrainer", "lvwerra/gpt2-imdb")


def test_grpo_has_the_values_of_trl() -> None:
    """But a KL weight, in the reward."""
    config = default_grpo_config()
    method = config.method
    assert isinstance(method, GRPOConfig)
    assert (method.num_generations, method.num_iterations, method.epsilon) == (8, 1, 0.2)
    assert (method.beta, method.kl_in, GRPOConfig().beta, GRPOConfig().kl_in) == (0.05, "reward", 0, "loss")
    assert (method.loss_type, method.scale_rewards, method.importance_sampling_level) == ("dapo", "group", "token")
    assert (config.train.trainer, config.optimizer.kwargs["lr"]) == ("GRPOTrainer", "auto")


def test_rloo_has_the_values_of_trl() -> None:
    """But its scores are scaled, so that beta is in units of their deviation."""
    config = default_rloo_config()
    method = config.method
    assert isinstance(method, RLOOConfig)
    assert (method.beta, method.kl_in, method.epsilon, method.baseline) == (0.05, "reward", 0.2, "leave_one_out")
    assert (method.scale_rewards, RLOOConfig().scale_rewards) == ("batch", "none")
    assert (config.train.trainer, config.optimizer.kwargs["lr"]) == ("RLOOTrainer", "auto")


def test_reward_has_the_values_of_trl() -> None:
    config = default_reward_config()
    assert (config.optimizer.kwargs["lr"], config.train.batch_size, config.train.seq_length) == (1e-4, 8, AUTO)
    assert isinstance(config.method, RewardConfig)
    assert (config.method.too_long, config.method.disable_dropout) == ("drop", True)


def test_dpo_has_the_values_of_trl() -> None:
    config = default_dpo_config()
    method, train = config.method, config.train
    assert isinstance(method, DPOConfig)
    assert (method.beta, method.loss_type, method.loss_weights, method.label_smoothing) == (0.1, ["sigmoid"], None, 0)
    assert (method.discopop_tau, method.ref_model_mixup_alpha, method.ref_model_sync_steps) == (0.05, 0.6, 512)
    assert (method.f_divergence_type, method.f_alpha_divergence_coef, method.disable_dropout) == (
        "reverse_kl",
        0.5,
        True,
    )
    assert (config.optimizer.kwargs["lr"], train.epochs, train.batch_size, train.seq_length) == (1e-6, 3, 8, AUTO)


def test_each_call_makes_its_own() -> None:
    for make in PRESETS.values():
        first = make()
        first.optimizer.kwargs["lr"] = 1.0
        assert make().optimizer.kwargs["lr"] != 1.0


def test_the_preset_that_fits_the_arguments() -> None:
    assert preset_for(reward_fn=len) == ("ppo", default_ppo_config())
    assert preset_for(samples=[]) == ("sft", default_sft_config())
    assert preset_for(preferences=[]) == ("dpo", default_dpo_config())
    assert preset_for(preferences=[], reward_fn=len) == ("dpo", default_dpo_config())
    assert preset_for(judge=len, reward_fn=len) == ("online_dpo", default_online_dpo_config())
    assert preset_for(samples=[], rewards=[]) == ("ilql", default_ilql_config())


def test_online_dpo_has_the_lengths_of_trl_and_larger_rounds() -> None:
    config = default_online_dpo_config()
    assert (config.optimizer.kwargs["lr"], config.train.batch_size, config.train.seq_length) == ("auto", 16, AUTO)
    assert config.to_dict()["method"]["n_generations_per_prompt"] == 8 and config.to_dict()["method"]["beta"] == 0.5
    assert (config.train.trainer, config.method.name) == ("OnlineDPOTrainer", "OnlineDPOConfig")


def test_ilql_has_the_values_of_trlx() -> None:
    config = default_ilql_config()
    train, method = config.train, config.method
    assert (train.seq_length, train.epochs, train.total_steps, train.batch_size) == (64, 100, 1000, 128)
    assert (config.model.model_path, config.model.num_layers_unfrozen) == ("gpt2", -1)
    assert config.optimizer.kwargs["lr"] == config.scheduler.kwargs["eta_min"] == 5e-5
    assert isinstance(method, ILQLConfig)
    assert (method.tau, method.gamma, method.cql_scale, method.awac_scale) == (0.7, 0.99, 0.1, 1)
    assert (method.alpha, method.beta, method.steps_for_target_q_sync, method.two_qs) == (0.001, 0, 5, True)
    assert method.gen_kwargs == {"max_new_tokens": 56, "top_k": 20, "beta": 1, "temperature": 1.0}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {},
            "train() needs a config, a reward_fn (for PPO), a judge (for Online DPO), samples (for SFT), samples and "
            "rewards (for ILQL) or preferences (for DPO).",
        ),
        (
            {"samples": [], "preferences": []},
            "samples fit SFT and preferences fit DPO; pass one of them, or a config.",
        ),
        (
            {"reward_fn": len, "samples": ["a"]},
            "reward_fn fits PPO and samples fit SFT; pass one of them, or a config.",
        ),
        (
            {"judge": len, "preferences": []},
            "a judge fits Online DPO, which makes its own samples: leave samples and preferences out.",
        ),
        (
            {"rewards": [1.0]},
            "rewards (for ILQL) need samples: pass train(samples=...) with one reward for each.",
        ),
    ],
)
def test_arguments_that_no_preset_fits(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        preset_for(**given)
    assert str(error.value) == sentence
