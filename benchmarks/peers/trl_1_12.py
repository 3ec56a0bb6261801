"""PPO with TRL 1.12, the last version that has its trainer. It takes a value model and a reward model as modules.

The trainer calls the backbone and the head of each by itself: those of the value model in each step, those of the
reward model once a round. Anything with these two parts will do, so the reward model here only calls a function.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.utils import create_reference_model

from benchmarks.peers.laps import Laps, reward


class Boundary(TrainerCallback):
    """Begin a lap after each round, which is a step to this trainer."""

    def __init__(self, laps: Laps) -> None:
        self.laps = laps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.laps.next()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.laps.next()


class Rewards(nn.Module):
    """Give the rewards of texts in the form of a reward model: the states are the rewards."""

    base_model_prefix = "states"

    def __init__(self, words: Any, prompt: int) -> None:
        super().__init__()
        self.words, self.prompt = words, prompt

    def states(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        texts = self.words.batch_decode(input_ids[:, self.prompt :], skip_special_tokens=True)
        scores = torch.tensor(reward(texts)).view(-1, 1, 1)  # [B, 1, 1]
        return SimpleNamespace(hidden_states=[scores.expand(*input_ids.shape, 1)])

    def score(self, states: Tensor) -> Tensor:
        return states


class NoValues(nn.Module):
    """Give 0 as the value of each token, in the form of a value model."""

    base_model_prefix = "states"

    def states(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[torch.zeros(*input_ids.shape, 1)])

    def score(self, states: Tensor) -> Tensor:
        return states


class Values(nn.Module):
    """A value model: a backbone with a linear head.

    Args:
        lm: Whose backbone it has. It is not copied.
    """

    base_model_prefix = "backbone"

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.backbone, self.score = lm.transformer, nn.Linear(lm.config.n_embd, 1)


def load(task: dict[str, Any]) -> tuple[Any, Any]:
    """Load the GPT-2 of a task, and a reference that shares its frozen blocks."""
    lm = AutoModelForCausalLM.from_pretrained(task["model"])
    shared = task["layers"] - task["unfrozen"] if task["unfrozen"] > 0 else None
    return lm, create_reference_model(lm, num_shared_layers=shared)


def main() -> None:
    laps = Laps()
    task = laps.task
    words = AutoTokenizer.from_pretrained(task["model"])
    policy, reference = load(task)
    values: nn.Module = NoValues()
    if task["value_model"] != "none":
        values = Values(policy if task["value_model"] == "policy" else load(task)[0])
    rollouts, batch = task["prompts_a_lap"], task["batch"]
    args = PPOConfig(
        output_dir=f"{task['model']}/trl",
        # One batch of the device is a round: gradients of several would be summed for one optimizer step.
        per_device_train_batch_size=rollouts,
        num_mini_batches=rollouts // batch,
        num_ppo_epochs=task["steps"] * batch // rollouts,
        local_rollout_forward_batch_size=rollouts,
        total_episodes=rollouts * task["laps"],
        num_sample_generations=0,
        response_length=task["response"],
        stop_token="eos",
        temperature=1.0,
        learning_rate=task["lr"],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=task["device"] == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"input_ids": words(task["prompts"])["input_ids"]})
    rewards = Rewards(words, task["prompt"])
    PPOTrainer(args, words, policy, reference, rewards, prompts, values, callbacks=[Boundary(laps)]).train()


if __name__ == "__main__":
    main()
