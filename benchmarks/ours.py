"""This project's side of `benchmarks.side_by_side`: the task of a file, lap by lap."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

import trlx_like
from benchmarks.peers.laps import Laps, reward
from trlx_like import ModelConfig, TRLConfig
from trlx_like.models.loading import load_model
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.text import TextSampler
from trlx_like.trainers.callbacks import Callback

TRAINERS = {"ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO", "online_dpo": "OnlineDPO"}
TRAINERS |= {"dpo": "DPO", "sft": "SFT", "reward": "Reward", "ddpo": "DDPO"}

CALLS = "of forward and generate are calls of the UNet"
"""Name of the CPU seconds that a UNet takes, without its gradients. Other phases have them too."""


class Boundary(Callback):
    """Begin a lap after each so many optimizer steps."""

    def __init__(self, laps: Laps) -> None:
        self.laps = laps

    def on_train_begin(self, trainer: Any) -> None:
        calls = {CALLS: 0.0} if self.laps.task["work"] == "ddpo" else {}

        def before(*_: Any) -> None:
            calls[CALLS] -= time.process_time()

        def after(*_: Any) -> None:
            calls[CALLS] += time.process_time()

        for module in trainer.model.modules() if calls else ():
            if type(module).__name__ == "UNet2DConditionModel":
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
        self.laps.phases = lambda: {**trainer.clock.cpu, **calls}
        self.laps.next()

    def on_step(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step % self.laps.task["steps"] == 0:
            self.laps.next()


def score(outputs: Sequence[str]) -> list[float]:
    return reward(outputs)


def brightness(images: Any) -> list[float]:
    means: list[float] = images.float().mean(dim=(1, 2, 3)).tolist()
    return means


def config(task: dict[str, Any]) -> TRLConfig:
    """Make the configuration of a task; what it leaves out has the defaults of this project."""
    sampled = {"gen_kwargs": {"max_new_tokens": task["response"], "temperature": 1.0}}
    steps, rollouts = task["steps"] * task["laps"], task["prompts_a_lap"]
    passes = task["steps"] * task["batch"] // max(1, rollouts)
    methods: dict[str, dict[str, Any]] = {
        "ppo": {"num_rollouts": rollouts, "chunk_size": rollouts, "ppo_epochs": passes, **sampled},
        **dict.fromkeys(
            ("grpo", "rloo"),
            {"num_prompts": rollouts, "chunk_size": rollouts, "num_generations": task["group"], **sampled},
        ),
        "online_dpo": sampled,
        "dpo": {"gen_kwargs": {"max_new_tokens": 1}, "precompute_ref_log_probs": False},
        "sft": {"gen_kwargs": {"max_new_tokens": 1}},
        "reward": {},
        "ddpo": {
            "num_inference_steps": task.get("denoising_steps"),
            "num_samples": rollouts,
            "chunk_size": rollouts,
            "image_type": "tensor",
            "advantages": "round",
            "vae_slicing": False,  # TRL decodes all images at once
        },
    }
    model, read = {"model_arch_type": "diffusion"}, dict[str, Any]()
    if task["work"] != "ddpo":
        model, read = {"num_layers_unfrozen": task["unfrozen"]}, {"seq_length": task["prompt"] + task["response"]}
    sampler = {} if task["sampling"] == "float32" else {"engine": "copy", "kwargs": {"dtype": task["sampling"]}}
    prefix = TRAINERS[task["work"]]
    return TRLConfig.from_dict(
        {
            "model": {"model_path": task["model"], **model},
            "tokenizer": {"tokenizer_path": task["model"]} if read else {},
            "optimizer": {"name": "adamw", "kwargs": {"lr": task["lr"]}},
            "sampler": sampler,
            "method": {"name": f"{prefix}Config", **methods[task["work"]]},
            "train": {
                "trainer": f"{prefix}Trainer",
                "total_steps": steps,
                "epochs": steps,
                **read,
                "batch_size": task["batch"],
                "eval_interval": steps + 1,
                "checkpoint_interval": steps + 1,
                "checkpoint_dir": f"{task['model']}/ours",
            },
        }
    )


def decode(laps: Laps) -> None:
    """Sample what the cases of a task say, with the engine "transformers"."""
    lm = load_model(laps.task["model"], ModelConfig(model_path=laps.task["model"])).eval()  # as trainers do
    lm.to(laps.device)
    words = AutoTokenizer.from_pretrained(laps.task["model"])
    engine = TransformersEngine(lm, words)
    while True:
        for case in laps.in_turns():
            prompts = [text for text in case["prompts"] for _ in range(case["group"])]
            batch = PromptPipeline(prompts, case["prompt"], words)
            sampler = TextSampler(engine, words, batch_size=case["at_once"], device=laps.device)
            laps.next()
            sampler.sample(
                batch[range(len(batch))], {"max_new_tokens": case["response"], "eos_token_id": case["eos"]}, 1
            )


def main() -> None:
    laps = Laps()
    task = laps.task
    if task["work"] == "decode":
        decode(laps)
    data: dict[str, Any] = {"preferences": task["pairs"]}
    if task["work"] == "sft":
        data = {"samples": [(prompt, chosen) for prompt, chosen, _ in task["pairs"]]}
    elif task["prompts"]:
        data = {"prompts": task["prompts"], "eval_prompts": task["prompts"][:1]}
        data["reward_fn"] = brightness if task["work"] == "ddpo" else score
    trlx_like.train(config(task), callbacks=[Boundary(laps)], **data)


if __name__ == "__main__":
    main()
