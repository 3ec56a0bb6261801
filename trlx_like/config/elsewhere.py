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

_NAMES = {
    'not an option; call torch.set_float32_matmul_precision("high") before the run': "allow_tf32 tf32",
    "not available": (
        "activation_offloading auto_find_batch_size batch_eval_metrics delta eval_accumulation_steps eval_delay "
        "eval_do_concat_batches eval_packing eval_use_gather_object hub_revision ignore_data_skip include_for_metrics "
        "include_inputs_for_metrics jit_mode_eval label_names label_smoothing_factor liger_kernel_config "
        "normalize_advantages optim_target_modules pad_to_multiple_of padding_free parallelism_config past_index "
        "prediction_loss_only ray_scope reward_clip_range router_aux_loss_coef top_entropy_quantile torch_compile "
        "torch_compile_backend torch_compile_mode torchdynamo tpu_metrics_debug tpu_num_cores use_ipex "
        "use_legacy_prediction_loop use_liger_kernel use_transformers_paged"
    ),
    "train.push_to_hub, the repository to upload the best checkpoint to": "push_to_hub_if_best_kwargs",
    "not needed": (
        "average_tokens_across_devices chars_per_token compare_steps dataloader_drop_last dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_broadcast_buffers "
        "ddp_bucket_cap_mb ddp_find_unused_parameters do_eval do_predict do_train full_determinism "
        "gradient_checkpointing_kwargs include_num_input_tokens_seen include_tokens_per_second length_column_name "
        "logging_nan_inf_filter num_of_sequences optimize_cuda_cache optimize_device_cache overwrite_output_dir "
        "restore_callback_states_from_checkpoint save_on_each_node save_safetensors skip_memory_metrics "
        "torch_empty_cache_steps"
    ),
    "not needed, as the run is evaluated before its first step": "eval_on_start",
    "not needed, as the launcher says it": "ddp_backend ddp_timeout local_rank mp_parameters",
    "not needed, as a token is read from the environment, HF_TOKEN": "hub_token push_to_hub_token",
    'an option of the program: logging.getLogger("trlx_like").setLevel(...)': (
        "debug disable_tqdm log_level log_level_replica log_on_each_node"
    ),
    "train.save_optimizer: false": "save_only_model",
    "`trlx-like push --private`": "hub_private_repo",
    "not needed, as all data is tokenized at the start": "dataset_batch_size",
    "not needed, as all data is tokenized at the start by one process": "dataset_num_proc",
    "not needed, as every step is logged": "logging_first_step logging_steps logging_strategy",
    "not needed, as further keys of prompts reach the reward function": "remove_unused_columns",
    "not needed, as logits are made at responses only": "use_logits_to_keep",
    "not needed, as masks say what is padding": "label_pad_token_id padding_value",
    "not needed, as weights are gathered to generate": "ds3_gather_for_generation",
    "backend.device": "use_mps_device",
    "backend.device: cpu": "no_cuda use_cpu",
    "backend.kind: deepspeed": "deepspeed",
    "backend.kind: fsdp": "fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    "backend.mixed_precision": (
        "bf16 bf16_full_eval fp16 fp16_backend fp16_full_eval fp16_opt_level half_precision_backend"
    ),
    "data.reward_fn, or reward_fn=, with its folder": "reward_model_path",
    "method.adv_clip": "train_adv_clip_max",
    "method.advantages: prompt or round": "per_prompt_stat_tracking",
    "method.chunk_size": "sample_batch_size",
    "method.cliprange": "train_clip_range",
    "method.cliprange_reward": "score_clip",
    "method.eta": "sample_eta",
    "method.gen_kwargs": "generation_kwargs",
    "method.gen_kwargs.max_new_tokens": "response_length",
    "method.gen_kwargs.max_new_tokens, or train.seq_length": "max_completion_length",
    "method.gen_kwargs.max_new_tokens; draw it in a loop of your own": "length_sampler",
    "method.guidance_scale": "sample_guidance_scale",
    "method.init_kl_coef (with method.target: null)": "kl_coef",
    "method.inner_epochs": "train_num_inner_epochs",
    "method.kl_penalty": "kl_estimator",
    "method.negative_prompt": "negative_prompts",
    "method.norm_reward": "use_score_norm",
    "method.num_inference_steps": "sample_num_steps",
    "method.num_prompts x method.num_generations, for a round": "generation_batch_size",
    "method.num_prompts x method.num_generations, for a round, and train.batch_size for a step": "steps_per_generation",
    "method.num_rollouts divided by train.batch_size": "num_mini_batches",
    "method.num_samples, in images of all processes": "sample_num_batches_per_epoch",
    "method.packing: bins or blocks": "packing_strategy",
    "method.ppo_epochs": "num_ppo_epochs",
    "method.scale_reward": "use_score_scaling",
    "method.stat_buffer_size": "per_prompt_stat_tracking_buffer_size",
    "method.stat_min_count": "per_prompt_stat_tracking_min_count",
    "method.target (null is off)": "adap_kl_ctrl",
    "method.timestep_fraction": "train_timestep_fraction",
    "model.model_arch_type: seq2seq": "is_encoder_decoder",
    "model.model_extra_configs": "model_init_kwargs",
    "model.model_extra_configs, also of model.ref_model_path": "ref_model_init_kwargs",
    "model.model_path": "model_name model_name_or_path",
    "model.model_path: module:function": "model_init",
    "model.peft_config": "is_peft_model model_adapter_name",
    "model.peft_config; the reference is the adapter's own start": "ref_adapter_name",
    "model.ref_model_path": "force_use_ref_model",
    "optimizer.kwargs.betas": "adam_beta1 adam_beta2 train_adam_beta1 train_adam_beta2",
    "optimizer.kwargs.eps": "adam_epsilon train_adam_epsilon",
    "optimizer.kwargs.lr": "learning_rate train_learning_rate",
    "optimizer.kwargs.weight_decay": "train_adam_weight_decay weight_decay",
    "optimizer.kwargs": "optim_args",
    "optimizer.name": "adafactor optim optimizers",
    "optimizer.name: adamw_8bit_bnb": "train_use_8bit_adam",
    "reward.weights": "reward_weights",
    "reward.workers": "async_reward_computation max_workers",
    "rows with messages, whose loss is on what the assistant says": "assistant_only_loss",
    "rows with prompt and completion, whose loss is on the completion": "completion_only_loss",
    "sampler.batch_size": "per_device_eval_batch_size per_gpu_eval_batch_size",
    "sampler.batch_size, and train.minibatch_size for scoring": "local_rollout_forward_batch_size",
    "sampler.engine: paged": "use_transformers_paged",
    "sampler.engine: vllm": "use_vllm",
    "sampler.engine: vllm, which samples on servers, or vllm_colocated": "vllm_mode",
    "sampler.kwargs.timeout, with sampler.engine: vllm": "vllm_server_timeout",
    "sampler.kwargs.url, with sampler.engine: vllm": "vllm_server_base_url vllm_server_host vllm_server_port",
    "sampler.engine: vllm; an option of the servers, which you start": (
        "vllm_guided_decoding_regex vllm_tensor_parallel_size"
    ),
    "sampler.kwargs, with sampler.engine: vllm_colocated; servers have options of their own": (
        "gpu_memory_utilization vllm_gpu_memory_utilization vllm_model_impl"
    ),
    "scheduler.kwargs": "lr_scheduler_kwargs",
    "scheduler.name": "lr_scheduler_type",
    "scheduler.warmup": "warmup_steps",
    "scheduler.warmup, of which 0.1 is a tenth of train.total_steps": "warmup_ratio",
    "stop_sequences, or method.gen_kwargs.eos_token_id": "stop_token stop_token_id",
    "the prompts and samples that are passed to train(), or the section data": "dataset_name dataset_text_field",
    "the section backend, such as backend.mixed_precision and backend.device": "accelerator_config accelerator_kwargs",
    "tokenizer.chat_template": "chat_template_path",
    "tokenizer.truncation_side (keep_start is right)": "truncation_mode",
    "train.batch_size (of all processes together) and train.minibatch_size (of a forward pass)": (
        "gradient_accumulation_steps mini_batch_size per_device_train_batch_size per_gpu_train_batch_size "
        "train_batch_size train_gradient_accumulation_steps"
    ),
    "train.checkpoint_dir": "logdir output_dir",
    "train.best_metric": "metric_for_best_model",
    "train.best_mode: max or min": "greater_is_better",
    "train.checkpoint_interval": "save_steps save_strategy",
    "train.checkpoint_interval, in optimizer steps": "save_freq",
    "train.epochs": "infinite num_train_epochs",
    "train.epochs, in rounds": "num_epochs",
    "train.eval_interval": "eval_steps eval_strategy evaluation_strategy num_sample_generations",
    "train.keep_checkpoints": "num_checkpoint_limit save_total_limit",
    "train.logging_dir": "project_kwargs",
    "train.max_grad_norm": "train_max_grad_norm",
    "train.minibatch_size": "backward_batch_size precompute_ref_batch_size",
    "train.minibatch_size and sampler.batch_size": "forward_batch_size",
    "train.push_to_hub: owner/name": "hub_model_id push_to_hub_model_id push_to_hub_organization",
    "train.push_to_hub, which uploads when the run ends": "hub_always_push hub_strategy",
    "train.save_best": "load_best_model_at_end",
    "train.seed": "data_seed",
    "train.project_name": "tracker_project_name",
    "train.resume_from_checkpoint": "resume_from",
    "train.run_name": "task_name",
    "train.seq_length": "max_length max_seq_length",
    "train.total_steps": "max_steps steps",
    "train.total_steps (episodes x ppo_epochs / train.batch_size)": "total_episodes",
    "train.tracker": "log_with report_to",
}
"""The words behind "Here this is" -> names in TRL or transformers that they answer."""
_SAME = "cache_implementation max_new_tokens min_p repetition_penalty temperature top_k top_p"
"""Options of generation that TRL has under the same name in its configurations."""

ELSEWHERE = {
    **{name: words for words, names in _NAMES.items() for name in names.split()},
    **{name: f"method.gen_kwargs.{name}" for name in _SAME.split()},
}
"""Name in TRL or transformers -> the words behind "Here this is"."""

ARGUMENTS = {
    "args": "config=, a TRLConfig",
    "compute_metrics": "metric_fn=, which gets the generated text",
    "data_collator": "not needed; register_datapipeline adds a pipeline of your own",
    "dataset": "samples= with rewards=, or prompts=",
    "eval_dataset": "eval_prompts=, eval_samples= or eval_preferences=, by the trainer",
    "formatting_func": "method.formatting_func",
    "image_samples_hook": "method.grid_interval, or a Callback",
    "model": "model_path=, a name, a folder or a loaded model",
    "num_shared_layers": "model.num_layers_unfrozen, the other layers",
    "packing": "method.packing",
    "peft_config": "model.peft_config",
    "preprocess_logits_for_metrics": "not needed, as metric_fn= gets the generated text",
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

_METHODS = {
    "learn()": "train",
    "save_pretrained(folder)": "save_model",
    "save()": "save_state",
    "load(folder), or train.resume_from_checkpoint": "load_state",
    "last_metrics, and metrics.jsonl in the run folder": "log_metrics save_metrics",
    "not needed, as the loop logs each step; log_stats logs more in a loop by hand": "log",
    "generate(prompts), or for a reward model RewardModel(folder)": "predict",
    "train.push_to_hub, or `trlx-like push RUN owner/name` afterwards": "push_to_hub",
    "not needed, as `trlx-like push` and `trlx-like export` write one": "create_model_card",
    "round_batches()": "get_train_dataloader train_dataloader",
    "eval_batches()": "get_eval_dataloader get_test_dataloader eval_dataloader",
    "evaluate()": "evaluation_loop prediction_loop prediction_step",
    "optimize(batch)": "training_step train_minibatch",
    "loss(batch)": "compute_loss",
    "the argument callbacks of train and of trainers": "add_callback callback_handler pop_callback remove_callback",
    "the sections optimizer and scheduler": "create_optimizer create_optimizer_and_scheduler create_scheduler",
    "optimizer": "opt",
    "optimisation.scheduler": "lr_scheduler scheduler",
    "`trlx-like sweep`": "hyperparameter_search",
    "config": "args",
    "kl_coef": "kl_ctl",
    "progress.step": "current_step global_step iter_count",
    "world.size": "is_distributed",
    "tokenizer": "processing_class",
    "model, which holds the reference as well": "ref_model",
    "data, what was given by name": "dataset eval_dataset train_dataset",
    "world.main": "is_local_process_zero is_world_process_zero",
    "device": "current_device",
}
"""The words behind "Here this is" -> names of methods and attributes of trainers that they answer."""
METHODS = {name: words for words, names in _METHODS.items() for name in names.split()}
"""Method or attribute of a trainer in TRL, transformers or trlX -> the words behind "Here this is"."""


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
