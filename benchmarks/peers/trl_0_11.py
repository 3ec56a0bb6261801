"""PPO with TRL 0.11.4, the last version with a value head on the policy and rewards from a function."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from transformers import PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

from benchmarks.peers.laps import Laps, reward


def main() -> None:
    laps = Laps()
    task = laps.task
    # By the file alone: the settings beside it are those of a later transformers.
    words = PreTrainedTokenizerFast(
        tokenizer_file=f"{task['model']}/tokenizer.json", eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(task["model"], summary_dropout_prob=0.0)
    shared = task["layers"] - task["unfrozen"] if task["unfrozen"] > 0 else None
    reference = create_reference_model(model, num_shared_layers=shared)
    rollouts, batch = task["prompts_a_lap"], task["batch"]
    passes = task["steps"] * batch // rollouts
    config = PPOConfig(
        learning_rate=task["lr"],
        batch_size=rollouts,
        mini_batch_size=batch,
        ppo_epochs=passes,
        remove_unused_columns=False,
    )
    trainer = PPOTrainer(config, model, reference, words)
    prompts = cycle([torch.tensor(words(prompt)["input_ids"]) for prompt in task["prompts"]])
    options = {
        "max_new_tokens": task["response"],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
    }
    while True:
        laps.next()
        queries = list(islice(prompts, rollouts))
        responses = trainer.generate(queries, batch_size=rollouts, return_prompt=False, **options)
        scores = reward(words.batch_decode(responses, skip_special_tokens=True))
        trainer.step(queries, responses, [torch.tensor(score) for score in scores])


if __name__ == "__main__":
    main()
