"""GRPO and RLOO with TRL 1.16 from a given start, in float32 and without gradient checkpointing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.learning.recipes import LONGEST, WALKS
from benchmarks.learning.record import Recorder

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
FIXED = {
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


class Rounds(TrainerCallback):
    """Tell the recorder of the beginning, of each round that was learned from, and of the end."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self.recorder, self.steps = recorder, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.recorder.begin(given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == args.max_steps:
            self.recorder.end(given["model"])
        elif state.global_step % self.steps == 0:
            self.recorder.round(given["model"])


def main() -> None:
    recorder = Recorder()
    kind, arguments = TRAINERS[recorder.asked["method"]]
    # Of a round: its walks, and the optimizer steps that it is learned from in.
    options = {"per_device_train_batch_size": 8, "steps_per_generation": 1, "num_iterations": 1, **recorder.options}
    walks = options["per_device_train_batch_size"] * options["steps_per_generation"]
    steps = options["steps_per_generation"] * options["num_iterations"]

    def score(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return recorder.reward([start + text for start, text in zip(prompts, completions, strict=True)])

    with tempfile.TemporaryDirectory() as folder:
        given: Any = {"output_dir": folder, "seed": recorder.asked["seed"], "max_steps": WALKS // walks * steps}
        args = arguments(**FIXED, **given, max_completion_length=LONGEST, **options)
        kind(
            recorder.model,
            args=args,
            reward_funcs=score,
            train_dataset=Dataset.from_dict({"prompt": recorder.task.prompts}),
            processing_class=AutoTokenizer.from_pretrained(recorder.model),
            callbacks=[Rounds(recorder, steps)],
        ).train()


if __name__ == "__main__":
    main()
