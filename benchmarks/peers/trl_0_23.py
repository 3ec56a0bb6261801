"""DDPO with TRL 0.23.1, the last version that has its trainer."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from accelerate import PartialState
from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

from benchmarks.peers.laps import Laps


def main() -> None:
    laps = Laps()
    task = laps.task
    PartialState(cpu=True)  # without it the trainer fails where it says that no images are logged
    config = DDPOConfig(
        mixed_precision="no",
        accelerator_kwargs={"cpu": True},
        train_learning_rate=task["lr"],
        sample_num_steps=task["denoising_steps"],
        sample_batch_size=task["batch"],
        sample_num_batches_per_epoch=1,
        train_batch_size=task["batch"],
        save_freq=task["laps"] + 1,
    )
    prompts = cycle(task["prompts"])

    def brightness(images: Any, *_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return images.float().mean(dim=(1, 2, 3)), {}

    pipeline = DefaultDDPOStableDiffusionPipeline(task["model"], use_lora=False)
    trainer = DDPOTrainer(config, brightness, lambda: (next(prompts), {}), pipeline)
    step = 0
    for epoch in range(task["laps"] + 1):
        laps.next()
        step = trainer.step(epoch, step)


if __name__ == "__main__":
    main()
