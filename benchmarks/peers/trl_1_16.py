"""GRPO, RLOO, DPO, SFT, reward models and Online DPO with TRL 1.16, in float32 and without gradient checkpointing."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from benchmarks.peers.laps import Laps, reward


class Boundary(TrainerCallback):
    """Begin a lap after each so many optimizer steps."""

    def __init__(self, laps: Laps) -> None:
        self.laps = laps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.laps.next()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.laps.task["steps"] == 0:
            self.laps.next()


def score(completions: list[str], **_: Any) -> list[float]:
    return reward(completions)


def trainer(task: dict[str, Any], common: dict[str, Any]) -> tuple[type[Any], Any, dict[str, Any]]:
    """Return the class of a trainer, its arguments, and more that it is made with."""
    longest = task["prompt"] + task["response"]
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    prompts = Dataset.from_dict({"prompt": task["prompts"]})
    names = ("prompt", "chosen", "rejected")
    pairs = Dataset.from_dict({name: [row[at] for row in task["pairs"]] for at, name in enumerate(names)})
    if task["work"] == "grpo":
        group = {"num_generations": task["group"], "steps_per_generation": task["steps"], "num_iterations": 1}
        args = GRPOConfig(max_completion_length=task["response"], beta=0.0, **group, **sampled, **common)
        return GRPOTrainer, args, {"reward_funcs": score, "train_dataset": prompts}
    if task["work"] == "rloo":
        group = {"num_generations": task["group"], "steps_per_generation": task["steps"], "num_iterations": 1}
        args = RLOOConfig(max_completion_length=task["response"], **group, **sampled, **common)
        return RLOOTrainer, args, {"reward_funcs": score, "train_dataset": prompts}
    if task["work"] == "online_dpo":
        args = OnlineDPOConfig(max_new_tokens=task["response"], max_length=longest, **sampled, **common)
        return OnlineDPOTrainer, args, {"reward_funcs": score, "train_dataset": prompts}
    if task["work"] == "sft":
        rows = pairs.rename_column("chosen", "completion").remove_columns("rejected")
        return SFTTrainer, SFTConfig(max_length=longest, completion_only_loss=True, **common), {"train_dataset": rows}
    if task["work"] == "reward":
        return RewardTrainer, RewardConfig(max_length=longest, **common), {"train_dataset": pairs}
    return DPOTrainer, DPOConfig(max_length=longest, **common), {"train_dataset": pairs}


def frozen(path: str, unfrozen: int) -> Any:
    """Load a GPT-2 of which only the top blocks and the last norm are trained."""
    lm: Any = AutoModelForCausalLM.from_pretrained(path)
    lm.requires_grad_(False)
    for part in (*lm.transformer.h[-unfrozen:], lm.transformer.ln_f):
        part.requires_grad_(True)
    return lm


def main() -> None:
    laps = Laps()
    task = laps.task
    common = {
        "output_dir": f"{task['model']}/trl",
        "per_device_train_batch_size": task["batch"],
        "max_steps": task["steps"] * task["laps"],
        "learning_rate": task["lr"],
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": task["device"] == "cpu",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    kind, args, more = trainer(task, common)
    words = AutoTokenizer.from_pretrained(task["model"])
    model = task["model"] if task["unfrozen"] < 0 else frozen(task["model"], task["unfrozen"])
    kind(model, args=args, processing_class=words, callbacks=[Boundary(laps)], **more).train()


if __name__ == "__main__":
    main()
