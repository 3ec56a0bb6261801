"""What other libraries call options and arguments that have another name here, for the error about an unknown one.

Nothing takes these names: they are looked up after one was refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from trlx_like.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_BATCH = "train.batch_size (of all processes together) and train.minibatch_size (of a forward pass)"
_PROMPTS = "the prompts and samples that are passed to train(), or the section data"

ELSEWHERE = {
    "accelerator_kwargs": "the section backend, such as backend.mixed_precision and backend.device",
    "activation_offloading": "not available",
    "adam_beta1": "optimizer.kwargs.betas",
    "adam_beta2": "optimizer.kwargs.betas",
    "adam_epsilon": "optimizer.kwargs.eps",
    "adap_kl_ctrl": "method.target (null is off)",
    "allow_tf32": 'not an option; call torch.set_float32_matmul_precision("high") before the run',
    "assistant_only_loss": "rows with messages, whose loss is on what the assistant says",
    "async_reward_computation": "reward.workers",
    "bf16": "backend.mixed_precision",
    "cache_implementation": "method.gen_kwargs.cache_implementation",
    "chars_per_token": "not needed",
    "chat_template_path": "tokenizer.chat_template",
    "chosen_ids": "not taken; give rows with text or messages",
    "compare_steps": "not needed",
    "completion_only_loss": "rows with prompt and completion, whose loss is on the completion",
    "dataset_batch_size": "not needed, as all data is tokenized at the start",
    "dataset_name": _PROMPTS,
    "dataset_num_proc": "not needed, as all data is tokenized at the start by one process",
    "dataset_text_field": _PROMPTS,
    "delta": "not available",
    "ds3_gather_for_generation": "not needed, as weights are gathered to generate",
    "eval_packing": "not available",
    "eval_steps": "train.eval_interval",
    "force_use_ref_model": "model.ref_model_path",
    "forward_batch_size": "train.minibatch_size and sampler.batch_size",
    "fp16": "backend.mixed_precision",
    "generation_batch_size": "method.num_prompts x method.num_generations, for a round",
    "generation_kwargs": "method.gen_kwargs",
    "gradient_accumulation_steps": _BATCH,
    "is_encoder_decoder": "model.model_arch_type: seq2seq",
    "is_peft_model": "model.peft_config",
    "kl_coef": "method.init_kl_coef (with method.target: null)",
    "kl_estimator": "method.kl_penalty",
    "label_pad_token_id": "not needed, as masks say what is padding",
    "label_smoothing_factor": "not available",
    "learning_rate": "optimizer.kwargs.lr",
    "length_sampler": "method.gen_kwargs.max_new_tokens; draw it in a loop of your own",
    "local_rollout_forward_batch_size": "sampler.batch_size, and train.minibatch_size for scoring",
    "log_with": "train.tracker",
    "logdir": "train.checkpoint_dir",
    "logging_steps": "not needed, as every step is logged",
    "lr_scheduler_kwargs": "scheduler.kwargs",
    "lr_scheduler_type": "scheduler.name",
    "max_completion_length": "method.gen_kwargs.max_new_tokens, or train.seq_length",
    "max_length": "train.seq_length",
    "max_new_tokens": "method.gen_kwargs.max_new_tokens",
    "max_seq_length": "train.seq_length",
    "max_steps": "train.total_steps",
    "max_workers": "reward.workers",
    "min_p": "method.gen_kwargs.min_p",
    "mini_batch_size": _BATCH,
    "model_adapter_name": "model.peft_config",
    "model_init": "model.model_path: module:function",
    "model_init_kwargs": "model.model_extra_configs",
    "model_name": "model.model_path",
    "model_name_or_path": "model.model_path",
    "negative_prompts": "method.negative_prompt",
    "normalize_advantages": "not available",
    "num_checkpoint_limit": "train.keep_checkpoints",
    "num_epochs": "train.epochs, in rounds",
    "num_mini_batches": "method.num_rollouts divided by train.batch_size",
    "num_of_sequences": "not needed",
    "num_ppo_epochs": "method.ppo_epochs",
    "num_sample_generations": "train.eval_interval",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer.name",
    "optimize_cuda_cache": "not needed",
    "optimize_device_cache": "not needed",
    "output_dir": "train.checkpoint_dir",
    "packing_strategy": "method.packing: bins or blocks",
    "pad_to_multiple_of": "not available",
    "padding_free": "not available",
    "padding_value": "not needed, as masks say what is padding",
    "per_device_eval_batch_size": "sampler.batch_size",
    "per_device_train_batch_size": _BATCH,
    "per_prompt_stat_tracking": "method.advantages: prompt or round",
    "per_prompt_stat_tracking_buffer_size": "method.stat_buffer_size",
    "per_prompt_stat_tracking_min_count": "method.stat_min_count",
    "precompute_ref_batch_size": "train.minibatch_size",
    "project_kwargs": "train.logging_dir",
    "push_to_hub": "not done by a run; push the exported folder with `hf upload`",
    "push_to_hub_if_best_kwargs": "not done by a run; push the exported folder with `hf upload`",
    "ref_adapter_name": "model.peft_config; the reference is the adapter's own start",
    "ref_model_init_kwargs": "model.model_extra_configs, also of model.ref_model_path",
    "rejected_ids": "not taken; give rows with text or messages",
    "remove_unused_columns": "not needed, as further keys of prompts reach the reward function",
    "repetition_penalty": "method.gen_kwargs.repetition_penalty",
    "report_to": "train.tracker",
    "response_length": "method.gen_kwargs.max_new_tokens",
    "resume_from": "train.resume_from_checkpoint",
    "reward_clip_range": "not available",
    "reward_model_path": "data.reward_fn, or reward_fn=, with its folder",
    "reward_weights": "reward.weights",
    "router_aux_loss_coef": "not available",
    "sample_batch_size": "method.chunk_size",
    "sample_eta": "method.eta",
    "sample_guidance_scale": "method.guidance_scale",
    "sample_num_batches_per_epoch": "method.num_samples, in images of all processes",
    "sample_num_steps": "method.num_inference_steps",
    "save_freq": "train.checkpoint_interval, in optimizer steps",
    "save_steps": "train.checkpoint_interval",
    "save_total_limit": "train.keep_checkpoints",
    "score_clip": "method.cliprange_reward",
    "steps": "train.total_steps",
    "steps_per_generation": "method.num_prompts x method.num_generations, for a round, and train.batch_size for a step",
    "stop_token": "stop_sequences, or method.gen_kwargs.eos_token_id",
    "stop_token_id": "stop_sequences, or method.gen_kwargs.eos_token_id",
    "task_name": "train.run_name",
    "temperature": "method.gen_kwargs.temperature",
    "top_entropy_quantile": "not available",
    "top_k": "method.gen_kwargs.top_k",
    "top_p": "method.gen_kwargs.top_p",
    "total_episodes": "train.total_steps (episodes x ppo_epochs / train.batch_size)",
    "tf32": 'not an option; call torch.set_float32_matmul_precision("high") before the run',
    "tracker_project_name": "train.project_name",
    "train_adam_beta1": "optimizer.kwargs.betas",
    "train_adam_beta2": "optimizer.kwargs.betas",
    "train_adam_epsilon": "optimizer.kwargs.eps",
    "train_adam_weight_decay": "optimizer.kwargs.weight_decay",
    "train_adv_clip_max": "method.adv_clip",
    "train_batch_size": _BATCH,
    "train_clip_range": "method.cliprange",
    "train_gradient_accumulation_steps": _BATCH,
    "train_learning_rate": "optimizer.kwargs.lr",
    "train_max_grad_norm": "train.max_grad_norm",
    "train_num_inner_epochs": "method.inner_epochs",
    "train_timestep_fraction": "method.timestep_fraction",
    "train_use_8bit_adam": "optimizer.name: adamw_8bit_bnb",
    "use_liger_kernel": "not available",
    "truncation_mode": "tokenizer.truncation_side (keep_start is right)",
    "use_logits_to_keep": "not needed, as logits are made at responses only",
    "use_score_norm": "method.norm_reward",
    "use_score_scaling": "method.scale_reward",
    "use_vllm": "sampler.engine: vllm",
    "vllm_mode": "sampler.engine: vllm, which samples on servers",
    "warmup_ratio": "scheduler.warmup, of which 0.1 is a tenth of train.total_steps",
    "warmup_steps": "scheduler.warmup",
    "weight_decay": "optimizer.kwargs.weight_decay",
}
"""Name in TRL or transformers -> the words behind "Here this is"."""

ARGUMENTS = {
    "args": "config=, a TRLConfig",
    "compute_metrics": "metric_fn=, which gets the generated text",
    "data_collator": "not needed; register_datapipeline adds a pipeline of your own",
    "dataset": "samples= with rewards=, or prompts=",
    "eval_dataset": "eval_prompts= or eval_preferences=",
    "image_samples_hook": "method.grid_interval, or a Callback",
    "model": "model_path=, a name, a folder or a loaded model",
    "num_shared_layers": "model.num_layers_unfrozen, the other layers",
    "optimizers": "optimizer.name and scheduler.name; register_optimizer adds one of your own",
    "peft_config": "model.peft_config",
    "processing_class": "tokenizer=",
    "prompt_function": "prompts=",
    "ref_model": "model.ref_model_path",
    "reward_function": "reward_fn=",
    "reward_funcs": "reward_fn=, one or a list",
    "reward_model": "reward_fn=, a RewardModel or its folder",
    "reward_processing_classes": "RewardModel(folder, tokenizer=...) as reward_fn=",
    "sd_pipeline": "model_path=, a name, a folder or a loaded pipeline",
    "train_dataset": "prompts=, samples= or preferences=, by the trainer",
    "value_model": "not needed, as the policy has a value head",
}
"""Argument of a trainer or function in TRL or trlX -> the words behind "Here this is"."""


def named_elsewhere(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function answer an argument of another library with the name here, and not with a TypeError."""
    known = set(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known and (words := ARGUMENTS.get(name, ELSEWHERE.get(name))):
                raise ConfigError(f"{function.__name__} takes no {name}. Here this is {words}.")
        return function(*args, **kwargs)

    return call
