"""PPO with TRL 0.11.4 from a given start, with the loop of its documentation."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

from benchmarks.learning.recipes import LONGEST, WALKS
from benchmarks.learning.record import Recorder
from examples.randomwalks.task import EOS, PAD


def main() -> None:
    recorder = Recorder()
    # By the file alone: the settings beside it are those of a later transformers. Padding is on the right, as for GPT-2
    # in TRL's documentation: it passes no positions when it learns, and padding on the left would shift them.
    words = PreTrainedTokenizerFast(
        tokenizer_file=f"{recorder.model}/tokenizer.json", eos_token=EOS, pad_token=PAD, padding_side="right"
    )
    options = dict(recorder.options)
    final, adam = options.pop("final_rate", None), options.pop("adam", None)
    config = PPOConfig(seed=recorder.asked["seed"], remove_unused_columns=False, **options)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(recorder.model, summary_dropout_prob=0.0)
    optimizer: Any = None
    schedule: Any = None
    rounds = WALKS // config.batch_size
    if adam is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, **adam)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final / config.learning_rate, total_iters=rounds)
    trainer = PPOTrainer(config, model, None, words, optimizer=optimizer, lr_scheduler=schedule)
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": LONGEST}
    sampled |= {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    prompts = recorder.task.prompts
    rng = random.Random(recorder.asked["seed"])
    waiting: list[str] = []
    recorder.begin(model.pretrained_model)
    for number in range(rounds):
        while len(waiting) < config.batch_size:  # all nodes, in an order of their own each time
            waiting += rng.sample(prompts, len(prompts))
        starts, waiting = waiting[: config.batch_size], waiting[config.batch_size :]
        queries = [torch.tensor(words(start)["input_ids"]) for start in starts]
        responses = trainer.generate(queries, batch_size=config.batch_size, return_prompt=False, **sampled)
        texts = words.batch_decode(responses, skip_special_tokens=True)
        scores = recorder.reward([start + text for start, text in zip(starts, texts, strict=True)])
        trainer.step(queries, responses, [torch.tensor(score) for score in scores])
        if number + 1 < rounds:
            recorder.round(model.pretrained_model)
    recorder.end(model.pretrained_model)


if __name__ == "__main__":
    main()
