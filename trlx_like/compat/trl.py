"""Names of TRL: judges to derive from, whose `judge(prompts, completions)` you write, and PPO by hand (`trl_ppo`).

A judge for TRL runs after a change of the import. Here a judge compares, ranks or checks (`trlx_like.rewards.judges`);
these classes turn TRL's answers into those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

_METHODS = {
    "DDPO": "default_ddpo_config(), reward_fn, prompts",
    "DPO": "default_dpo_config(), preferences=...",
    "GRPO": "default_grpo_config(), reward_fn, prompts",
    "KTO": "default_kto_config(), preferences=...",
    "OnlineDPO": "default_online_dpo_config(), prompts=..., judge=...",
    "RLOO": "default_rloo_config(), reward_fn, prompts",
    "Reward": "default_reward_config(), preferences=...",
    "SFT": "default_sft_config(), samples=...",
}
"""Trainers of TRL whose constructors are not made here -> the arguments of `trlx_like.train` in their place."""
GONE = {
    **{
        f"{name}{kind}": f"trlx_like.train({given}), and MIGRATING.md for the option in place of each of TRL's"
        for name, given in _METHODS.items()
        for kind in ("Config", "Trainer")
    },
    **dict.fromkeys(
        ("HfArgumentParser", "ModelConfig", "ScriptArguments", "TrlParser"),
        "a YAML file with trlx_like.TRLConfig.load_yaml, and --set on the command line",
    ),
    **dict.fromkeys(
        ("DPODataCollatorWithPadding", "RewardDataCollatorWithPadding", "compute_accuracy"),
        "nothing in its place: trainers pad, and measure the accuracy of pairs themselves",
    ),
    **dict.fromkeys(
        (
            "apply_chat_template",
            "extract_prompt",
            "maybe_apply_chat_template",
            "maybe_extract_prompt",
            "unpair_preference_dataset",
        ),
        "nothing in its place: data may be text or messages, and preferences may be of any trainer's form",
    ),
    **dict.fromkeys(
        ("DDPOPipelineOutput", "DDPOSchedulerOutput", "DDPOStableDiffusionPipeline"),
        "model.model_path, a pipeline of diffusers; register_diffusion_family tells how another kind is called",
    ),
    **dict.fromkeys(
        ("TextEnvironment", "TextHistory"),
        "a loop of your own with generate, and response_masks in step for the tokens of tools",
    ),
    **dict.fromkeys(("best_of_n", "BestOfNSampler"), "RFTTrainer, or rank the responses of trainer.generate"),
    **dict.fromkeys(("PPOv2Config", "PPOv2Trainer"), "PPOConfig and PPOTrainer"),
    **dict.fromkeys(("GKDConfig", "GKDTrainer"), "trlx_like.train(default_distill_config(), prompts=...)"),
    "RandomPairwiseJudge": "a class of your own that derives from BasePairwiseJudge",
    "RandomRankJudge": "a class of your own that derives from BaseRankJudge",
    "RichProgressCallback": "nothing in its place: the console shows each step",
    "SyncRefModelCallback": "method.sync_ref_model: true, of DPO",
    "get_peft_config": "model.peft_config",
    "get_quantization_config": "model.quantization: nf4 or int8",
    "get_kbit_device_map": "nothing in its place: a model is on the device of its process",
    "respond_to_batch": "trainer.generate(queries)",
    "setup_chat_format": "tokenizer.chat_template, a file or its text",
    "ConstantLengthDataset": "method.packing: blocks",
    "DataCollatorForCompletionOnlyLM": "rows with prompt and completion, whose loss is on the completion",
    "DefaultDDPOStableDiffusionPipeline": "model.model_path, the name, folder or loaded pipeline",
    "HfPairwiseJudge": 'judge={"name": "llm", "url": ..., "model": ...}',
    "OpenAIPairwiseJudge": 'judge={"name": "llm", "model": ...}',
    "PairRMJudge": 'judge={"name": "reward_model", "model": ...}, a local reward model',
    "LogCompletionsCallback": "train.log_samples, which writes samples.jsonl, the report and the trackers' tables",
    "WinRateCallback": "train(metric_fn=trlx_like.WinRate(judge))",
}
"""Names of TRL that are not made here, with what to use."""


class BaseJudge(ABC):
    """Judge completions in TRL's way; derive from one of the three classes below."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> Sequence[Any]:
        """Judge the completions of each prompt, and return one answer per prompt."""


class BasePairwiseJudge(BaseJudge):
    """Compare: `judge` gets a pair of completions per prompt and returns 0, 1, or -1 if it cannot tell."""

    def compare(self, *, prompts: list[str], pairs: list[tuple[str, str]]) -> list[int | None]:
        """Compare the two completions of each pair."""
        answers = self.judge(prompts, [list(pair) for pair in pairs])
        return [None if answer == -1 else answer for answer in answers]


class BaseRankJudge(BaseJudge):
    """Rank: `judge` gets the completions of each prompt and returns their places in the list, the best first."""

    def rank(self, *, prompts: list[str], completions: list[list[str]]) -> list[list[int]]:
        """Rank the completions of each prompt."""
        return [[list(order).index(n) for n in range(len(order))] for order in self.judge(prompts, completions)]


class BaseBinaryJudge(BaseJudge):
    """Check: `judge` gets one completion per prompt and returns 1, 0, or -1 if it cannot tell."""

    def check(self, *, prompts: list[str], completions: list[str]) -> list[bool | None]:
        """Check each completion."""
        return [None if answer == -1 else answer for answer in self.judge(prompts, completions)]


class AllTrueJudge(BaseBinaryJudge):
    """Check several things: 1 if all judges say 1, 0 if one says 0, and -1 if one cannot tell.

    Source: Xu et al. 2024, "The Perfect Blend: Redefining RLHF with Mixture of Judges", arXiv:2409.20370, and TRL.

    Args:
        judges: Binary judges of TRL's kind, or objects with `check`.
    """

    def __init__(self, judges: Sequence[Any]) -> None:
        self.judges = list(judges)

    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        """Judge each completion by all judges."""
        given = [one.check(prompts=prompts, completions=completions) for one in self.judges]
        return [_all([row[place] for row in given]) for place in range(len(prompts))]


def _all(answers: Sequence[bool | None]) -> int:
    return -1 if None in answers else int(all(answers))


_MADE = {
    **dict.fromkeys(("LengthSampler", "PPOConfig", "PPOTrainer"), "compat.trl_ppo"),
    **dict.fromkeys(("AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead"), "models.value_head"),
    "IterativeSFTTrainer": "compat.trl_sft",
    "PreTrainedModelWrapper": "models.wrapper",
    "create_reference_model": "models.reference",
}
"""Names of TRL that are made in other modules of this package, under the same name."""


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return getattr(import_module(f"trlx_like.{_MADE[name]}"), name)
    if name == "set_seed":
        return import_module("trlx_like.checkpoint").seed_everything
    if name in GONE:
        raise ImportError(f"{__name__} has no {name}; use {GONE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
