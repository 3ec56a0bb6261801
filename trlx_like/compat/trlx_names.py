"""The names of trlX: what each stands for in this package, or what to use in its place. Imports nothing."""

from __future__ import annotations

_CONFIGS = {
    name: f"config:{name}"
    for name in ["TRLConfig", "ModelConfig", "TokenizerConfig", "OptimizerConfig", "SchedulerConfig", "TrainConfig"]
}
_METHODS = {name: f"config:{name}" for name in ("PPOConfig", "ILQLConfig", "SFTConfig", "RFTConfig")}
_BASE = {"MethodConfig": "config:MethodConfig", "register_method": "config:register_method"}
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MODULES: dict[str, dict[str, str]] = {
    "trlx": {"train": "compat.trlx:train", "logging": "=trlx.utils.logging:"},
    "trlx.trlx": {"train": "compat.trlx:train"},
    "trlx.data": {},
    "trlx.data.configs": {
        **_CONFIGS,
        "MethodConfig": "config:MethodConfig",
        "get_method": "config.registries:method_class",
    },
    "trlx.data.default_configs": {
        **_CONFIGS,
        **_METHODS,
        "default_ppo_config": "compat.trlx:default_ppo_config",
        **{f"default_{name}_config": f"presets:default_{name}_config" for name in ("ilql", "sft")},
    },
    "trlx.data.method_configs": {**_BASE, **_METHODS, "get_method": "config.registries:method_class"},
    "trlx.data.ppo_types": dict.fromkeys(("PPORLElement", "PPORLBatch"), "trainers.ppo:PPOExperience"),
    "trlx.data.ilql_types": dict.fromkeys(
        ("ILQLElement", "ILQLBatch", "ILQLSeq2SeqElement", "ILQLSeq2SeqBatch"), "trainers.ilql:ILQLExperience"
    ),
    "trlx.models": {},
    "trlx.models.modeling_base": {"PreTrainedModelWrapper": "models.wrapper:PreTrainedModelWrapper"},
    "trlx.models.modeling_ppo": {
        "PPOConfig": "config:PPOConfig",
        "AutoModelForCausalLMWithValueHead": "models.value_head:AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead": "models.value_head:AutoModelForSeq2SeqLMWithValueHead",
    },
    "trlx.models.modeling_ilql": {
        "ILQLConfig": "config:ILQLConfig",
        "ILQLHeads": "models.heads:ILQLHeads",
        "AutoModelForCausalLMWithILQLHeads": "samplers.guided:AutoModelForCausalLMWithILQLHeads",
        "AutoModelForSeq2SeqLMWithILQLHeads": "samplers.guided:AutoModelForSeq2SeqLMWithILQLHeads",
    },
    "trlx.pipeline": {"register_datapipeline": "pipelines.prompts:register_datapipeline"},
    "trlx.pipeline.offline_pipeline": {"PromptPipeline": "pipelines.prompts:PromptPipeline"},
    "trlx.pipeline.ppo_pipeline": {"PPORolloutStorage": "data:RolloutStore"},
    "trlx.trainer": {"BaseRLTrainer": "trainers.base:BaseRLTrainer", "register_trainer": "config:register_trainer"},
    "trlx.trainer.accelerate_base_trainer": {"AccelerateRLTrainer": "trainers.text:TextTrainer"},
    **{
        f"trlx.trainer.accelerate_{name.lower()}_trainer": {
            f"{name}Config": f"config:{name}Config",
            f"Accelerate{name}Trainer": f"trainers.{name.lower()}:{name}Trainer",
        }
        for name in ("PPO", "ILQL", "SFT", "RFT")
    },
    "trlx.utils": {"set_seed": "checkpoint:seed_everything"},
    "trlx.utils.loading": {"get_trainer": "config:TRAINERS.get", "get_pipeline": "pipelines.prompts:DATAPIPELINES.get"},
    "trlx.utils.modeling": {},
    "trlx.utils.logging": {
        "get_logger": "compat.trlx:get_logger",
        "set_verbosity": "compat.trlx:set_verbosity",
        **{f"set_verbosity_{level.lower()}": f"compat.trlx:set_verbosity {level}" for level in LEVELS},
        **{level: f"=logging:{level}" for level in LEVELS},
    },
}
"""trlX's modules: name in trlX -> "module:attribute" in this package."""

_GONE = {
    "trlx_like.default_dpo_config(), and trlx_like.train(config, preferences=...) with rows of prompt, chosen and "
    "rejected": "AccelerateDPOTrainer DPOConfig DPOElement DPOPreferenceBatch DPOStore default_dpo_config",
    "a pipeline is any class with __len__ and __getitem__(rows), see trlx_like.pipelines.prompts": "BasePipeline",
    "a reward or metric function gets what it needs by keyword; experience is a dataclass, see trlx_like.data": (
        "AccelerateRLBatchElement AccelerateRLElement BatchElement GeneralElement RLElement"
    ),
    "copy this helper of trlX into your program": (
        "Clock OptimizerName SchedulerName batched_index_select filter_non_scalars findattr flatten_dataclass "
        "flatten_dict get_distributed_config get_git_tag get_tensor_stats infinite_dataloader logprobs_of_labels "
        "pad_to_length print_rank_0 rgetattr rhasattr significant to_device topk_mask tree_map unflatten_dataclass"
    ),
    "experience is kept in a trlx_like.data.RolloutStore": (
        "BaseRolloutStore ILQLRolloutStorage ILQLSeq2SeqRolloutStorage"
    ),
    "gather with trainer.world, such as trainer.world.gather(list)": "gather_dict get_global_statistics",
    "ILQLTrainer encodes samples and rewards itself: pass samples= and rewards= to train": (
        "make_experience make_experience_seq2seq"
    ),
    "NeMo is not supported; use the trainers of trlx_like": (
        "NeMoILQLTrainer NeMoPPOTrainer NeMoSFTTrainer default_nemo_1_3b_config default_nemo_20b_config "
        "default_nemo_2b_config"
    ),
    "pass dialogues as samples; they are encoded by trlx_like.pipelines.dialogues.encode_dialogues": (
        "DialogMessage DialogStore tokenize_dialogue"
    ),
    "prompts are batched by trlx_like.pipelines.prompts.PromptBatch": "PromptBatch PromptElement",
    "set method.init_kl_coef, and method.target to null": "FixedKLController",
    "set method.scale_reward to running": "RunningMoments",
    "set method.target, method.horizon and method.init_kl_coef": "AdaptiveKLController",
    "set model.num_layers_unfrozen": "freeze_bottom_causal_layers freeze_bottom_seq2seq_layers",
    "set model.peft_config": "get_delta_model_class parse_delta_kwargs regex_for_range",
    "set optimizer.name; trlx_like.register_optimizer adds one": "get_optimizer_class",
    "set scheduler.name; trlx_like.register_scheduler adds one": "get_scheduler_class rampup_decay",
    "set train.minibatch_size": "MiniBatchIterator",
    "the heads are in trlx_like.models.heads": "make_head",
    "the models return tuples, see MIGRATING.md": (
        "CausalILQLOutput CausalLMOutputWithValue Seq2SeqILQLOutput Seq2SeqLMOutputWithValue"
    ),
    "the trainer adds the reference (model.num_layers_unfrozen)": (
        "AutoModelForCausalLMWithHydraValueHead AutoModelForSeq2SeqLMWithHydraValueHead BloomModelBranch "
        "GPTBigCodeModelBranch GPTModelBranch LlamaModelBranch ModelBranch OPTModelBranch T5Branch hf_get_branch_class"
    ),
    "use TRLConfig.update": "merge_dicts",
    "use method.num_value_layers_unfrozen": "make_value_branch",
    "use the functions of trlx_like.models.layout": (
        "hf_get_decoder hf_get_decoder_blocks hf_get_decoder_final_norm hf_get_hidden_size hf_get_lm_head "
        "hf_get_num_hidden_layers"
    ),
    "use trlx_like.functional.masked.whiten, which takes a mask": "whiten",
    "use the collate method of the experience, such as PPOExperience.collate": (
        "ilql_collate_fn ilql_seq2seq_collate_fn ppo_collate_fn"
    ),
}
"""What to use -> names of trlX that have no counterpart."""
GONE = {name: words for words, names in _GONE.items() for name in names.split()}
"""Name of trlX that has no counterpart -> what to use."""

MODULES_GONE = {
    "trlx.sweep": "`trlx-like sweep` runs a sweep file",
    "trlx.reference": "compare the metrics.jsonl of two runs",
    "trlx.trainer.nemo": GONE["NeMoPPOTrainer"],
    "trlx.models.modeling_nemo": GONE["NeMoPPOTrainer"],
    "trlx.data.accelerate_base_datatypes": GONE["PromptBatch"],
    "trlx.data.dpo_types": GONE["DPOElement"],
    "trlx.trainer.accelerate_dpo_trainer": GONE["DPOConfig"],
    "trlx.model.": "this is the layout of trlX 0.3; its later one is known, such as trlx.models",
    "trlx.orchestrator": "trainers make their experience themselves, by make_experience",
    "trlx.ray_t": "`trlx-like sweep` runs a sweep file",
}
"""Beginning of the name of a module of trlX that has no counterpart -> what to use."""
