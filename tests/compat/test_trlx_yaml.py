"""YAML files that people wrote for trlX run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.errors import ConfigError

PPO = """
train:
  seq_length: 1024
  epochs: 100
  total_steps: 10000
  batch_size: 32
  minibatch_size: 8
  checkpoint_interval: 10000
  eval_interval: 100
  pipeline: "PromptPipeline"
  trainer: "AcceleratePPOTrainer"
  trainer_kwargs: {}
  project_name: "trlx"
  run_name: sentiments
  entity_name: carper
  group_name: imdb
  checkpoint_dir: ckpts
  rollout_logging_dir: rollouts
  save_best: true
  save_optimizer: true
  resume_from_checkpoint: null
  tracker: "wandb"
  logging_dir: null
  tags: ["ppo"]
  seed: 1000

model:
  model_path: "lvwerra/gpt2-imdb"
  model_arch_type: "causal"
  num_layers_unfrozen: 2
  peft_config: {peft_type: LORA, r: 8}
  model_extra_configs: {}

tokenizer:
  tokenizer_path: "gpt2"
  padding_side: "left"
  truncation_side: "right"
  tokenizer_extra_configs: {}

optimizer:
  name: "adamw"
  kwargs:
    lr: 3.0e-5
    betas: [0.9, 0.95]
    eps: 1.0e-8
    weight_decay: 1.0e-6

scheduler:
  name: "cosine_annealing"
  kwargs:
    T_max: 10000
    eta_min: 3e-5

method:
  name: "ppoconfig"
  num_rollouts: 128
  chunk_size: 128
  ppo_epochs: 4
  init_kl_coef: 0.05
  target: 6
  horizon: 10000
  gamma: 1
  lam: 0.95
  cliprange: 0.2
  cliprange_value: 0.2
  vf_coef: 1
  scale_reward: "ignored"
  ref_mean: null
  ref_std: null
  cliprange_reward: false
  gen_kwargs:
    max_new_tokens: 40
    top_k: 0
    top_p: 1.0
    do_sample: true
  gen_experience_kwargs: null
  num_value_layers_unfrozen: 0
"""

SFT = """
train: {seq_length: 64, epochs: 1, total_steps: 10, batch_size: 8, checkpoint_interval: 10, eval_interval: 5,
        pipeline: PromptPipeline, trainer: AccelerateSFTTrainer, tracker: null}
model: {model_path: gpt2, num_layers_unfrozen: -1}
tokenizer: {tokenizer_path: gpt2, truncation_side: left}
optimizer: {name: adam_8bit_bnb, kwargs: {lr: 1e-4}}
scheduler: {name: linear, kwargs: {}}
method: {name: sftconfig, gen_kwargs: {max_new_tokens: 40, top_k: 20, temperature: [0.7, 1.0]}}
"""


def test_a_complete_ppo_file(tmp_path: Path) -> None:
    (tmp_path / "ppo.yml").write_text(PPO)
    config = TRLConfig.load_yaml(tmp_path / "ppo.yml")
    method = config.method
    assert isinstance(method, PPOConfig)
    assert (method.target, method.gamma, method.vf_coef) == (6.0, 1.0, 1.0)
    assert (method.scale_reward, method.cliprange_reward) == (None, None)
    assert TRAINERS.canonical(config.train.trainer) == "PPOTrainer"
    assert config.scheduler.kwargs["eta_min"] == 3e-5
    assert config.model.peft_config == {"peft_type": "LORA", "r": 8}
    assert config.unused_options() == [
        "model.num_layers_unfrozen"
    ]  # an adapter is trained in place of layers, as in trlX
    assert TRLConfig.update(config, {"train.tracker": None, "model.peft_config": None}).unused_options() == [
        "train.entity_name",
        "train.group_name",
        "train.tags",
    ]


def test_a_complete_sft_file(tmp_path: Path) -> None:
    (tmp_path / "sft.yml").write_text(SFT)
    config = TRLConfig.load_yaml(tmp_path / "sft.yml")
    assert isinstance(config.method, SFTConfig)
    assert TRAINERS.canonical(config.train.trainer) == "SFTTrainer"
    assert config.optimizer.kwargs == {"lr": 1e-4}


def test_nemo_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "nemo.yml"
    file.write_text(PPO.replace("AcceleratePPOTrainer", "NeMoPPOTrainer"))
    with pytest.raises(ConfigError) as error:
        TRLConfig.load_yaml(file)
    assert str(error.value) == (
        f"{file}:11: train.trainer: trainer 'NeMoPPOTrainer' is not available: "
        "NeMo is not supported; use PPOTrainer or SFTTrainer (see MIGRATING.md)."
    )
