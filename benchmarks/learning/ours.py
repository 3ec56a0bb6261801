"""This project's side of `benchmarks.learning`: a configuration of configs/ as it is, from a given start."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import trlx_like
from benchmarks.learning.record import Recorder
from examples import configurations
from trlx_like.trainers.callbacks import Callback


class Rounds(Callback):
    """Tell the recorder of the beginning, of each round that was learned from, and of the end."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self.recorder, self.steps = recorder, steps

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step == 0:  # the trainer's own evaluation, of one walk, is over
            self.recorder.begin(trainer.model.lm)

    def on_step(self, trainer: Any, metrics: Any) -> None:
        if trainer.finished:
            self.recorder.end(trainer.model.lm)
        elif trainer.progress.step % self.steps == 0:
            self.recorder.round(trainer.model.lm)


def main() -> None:
    recorder = Recorder()
    config = configurations.load(f"{recorder.asked['method']}_randomwalks")
    method: Any = config.method
    made = method.num_rollouts if hasattr(method, "num_rollouts") else method.num_prompts * method.num_generations
    passes = method.ppo_epochs if hasattr(method, "ppo_epochs") else method.num_iterations
    steps = config.train.total_steps

    def reward_fn(samples: Sequence[str], **_: Any) -> list[float]:
        return recorder.reward(samples)

    with tempfile.TemporaryDirectory() as folder:
        train = {"seed": recorder.asked["seed"], "checkpoint_dir": folder, "resume_from_checkpoint": None}
        config = config.evolve(
            model={"model_path": recorder.model},
            train={**train, "eval_interval": steps + 1, "checkpoint_interval": steps + 1},
        )
        prompts = recorder.task.prompts
        rounds = Rounds(recorder, made * passes // config.train.batch_size)
        trlx_like.train(
            config,
            reward_fn,
            prompts,
            eval_prompts=prompts[:1],
            metric_fn=recorder.task.metric_fn,
            callbacks=[rounds],
        )


if __name__ == "__main__":
    main()
