"""What TRL and transformers call options that have another name here, for the error about an unknown key.

No configuration takes these names: they are looked up after a key was refused.
"""

from __future__ import annotations

_BATCH = "train.batch_size (of all processes together) and train.minibatch_size (of a forward pass)"
_PROMPTS = "the prompts and samples that are passed to train(), or the section data"

ELSEWHERE = {
    "adam_beta1": "optimizer.kwargs.betas",
    "adam_beta2": "optimizer.kwargs.betas",
    "adam_epsilon": "optimizer.kwargs.eps",
    "adap_kl_ctrl": "method.target (null is off)",
    "bf16": "backend.mixed_precision",
    "dataset_batch_size": "not needed, as all data is tokenized at the start",
    "dataset_name": _PROMPTS,
    "dataset_num_proc": "not needed, as all data is tokenized at the start by one process",
    "dataset_text_field": _PROMPTS,
    "eval_steps": "train.eval_interval",
    "forward_batch_size": "train.minibatch_size and sampler.batch_size",
    "fp16": "backend.mixed_precision",
    "gradient_accumulation_steps": _BATCH,
    "learning_rate": "optimizer.kwargs.lr",
    "log_with": "train.tracker",
    "logdir": "train.checkpoint_dir",
    "logging_steps": "not needed, as every step is logged",
    "lr_scheduler_kwargs": "scheduler.kwargs",
    "lr_scheduler_type": "scheduler.name",
    "max_length": "train.seq_length",
    "max_new_tokens": "method.gen_kwargs.max_new_tokens",
    "max_seq_length": "train.seq_length",
    "max_steps": "train.total_steps",
    "mini_batch_size": _BATCH,
    "model_init_kwargs": "model.model_extra_configs",
    "model_name": "model.model_path",
    "model_name_or_path": "model.model_path",
    "num_ppo_epochs": "method.ppo_epochs",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer.name",
    "output_dir": "train.checkpoint_dir",
    "per_device_eval_batch_size": "sampler.batch_size",
    "per_device_train_batch_size": _BATCH,
    "push_to_hub": "not done by a run; push the exported folder with `hf upload`",
    "report_to": "train.tracker",
    "response_length": "method.gen_kwargs.max_new_tokens",
    "save_steps": "train.checkpoint_interval",
    "save_total_limit": "train.keep_checkpoints",
    "score_clip": "method.cliprange_reward",
    "temperature": "method.gen_kwargs.temperature",
    "tracker_project_name": "train.project_name",
    "use_score_norm": "method.norm_reward",
    "use_score_scaling": "method.scale_reward",
    "warmup_ratio": "scheduler.kwargs.num_warmup_steps, of which 0.1 is a tenth of train.total_steps",
    "warmup_steps": "scheduler.kwargs.num_warmup_steps",
    "weight_decay": "optimizer.kwargs.weight_decay",
}
"""Name in TRL or transformers -> the words behind "Here this is"."""
