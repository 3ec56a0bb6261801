"""The sections about the run: `train` and `data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from trlx_like.config.model import PathText
from trlx_like.config.problems import Problem
from trlx_like.config.registries import TRAINERS
from trlx_like.config.section import Section
from trlx_like.errors import RegistryError


def _known_trainer(name: str) -> str:
    try:
        TRAINERS.canonical(name)
    except RegistryError as error:
        raise ValueError(str(error)) from None
    return name


class TrainConfig(Section):
    """The section `train`."""

    section: ClassVar[str] = "train"

    total_steps: int = Field(ge=1)
    """Optimizer steps after which training stops."""
    seq_length: int = Field(default=1024, ge=1)
    """Tokens of prompt and response together, at most; of text."""
    epochs: int = Field(ge=1)
    """Rounds (online) or passes over the data (offline) after which training stops."""
    batch_size: int = Field(ge=1)
    """Samples of an optimizer step, over all processes."""
    minibatch_size: int | None = Field(default=None, ge=1)
    """Samples of a forward and backward pass, per process; null: all at once. The gradient is the same."""
    trainer: Annotated[str, AfterValidator(_known_trainer)]
    """Registered name of the trainer."""
    trainer_kwargs: dict[str, Any] = {}
    """Further keyword arguments of the trainer."""
    pipeline: str = "PromptPipeline"
    """Registered name of the pipeline that turns prompts into batches."""

    checkpoint_interval: int = Field(default=1000, ge=1)
    """Optimizer steps between checkpoints."""
    eval_interval: int = Field(default=100, ge=1)
    """Optimizer steps between evaluations."""
    checkpoint_dir: PathText = "ckpts"
    """Folder of the run."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Newest checkpoints that are kept, beside the best; null: all."""
    save_best: bool = True
    """Keep the checkpoint with the best evaluation."""
    best_metric: str | None = None
    """Metric that says which is best, larger being better; null: reward/mean, else metrics/reward."""
    save_optimizer: bool = True
    """Save the optimizer with each checkpoint, without which a run cannot be resumed exactly."""
    resume_from_checkpoint: PathText | None = None
    """A checkpoint to continue from, or "auto": the newest in `checkpoint_dir`, if there is one."""
    rollout_logging_dir: PathText | None = None
    """Folder for the experience of every round as text; null: not written."""

    log_samples: int = Field(default=4, ge=0)
    """Prompts of a round whose samples are shown, with all responses to each; 0: none."""
    log_samples_interval: int = Field(default=10, ge=1)
    """Optimizer steps between rounds whose samples are shown, at least; 1: every round."""
    tracker: str | list[str] | None = None
    """Registered names of trackers beside metrics.jsonl, for example wandb; null: none."""
    logging_dir: PathText | None = None
    """Folder of the tensorboard and wandb trackers; null: in `checkpoint_dir`."""
    project_name: str = "trlx_like"
    """Project that trackers file the run under."""
    run_name: str | None = None
    """Name of the run; null: that of its folder."""
    entity_name: str | None = None
    """Team or user of the wandb tracker."""
    group_name: str | None = None
    """Group of runs of the wandb tracker."""
    tags: list[str] = []
    """Tags of the wandb tracker."""

    seed: int = Field(default=1000, ge=0)
    """Seed of every random number."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Norm that gradients are clipped to; null: not clipped."""
    reward_on_main_process: bool = False
    """Call the reward function on the main process only, with the samples of all, as trlX does."""

    @property
    def trackers(self) -> list[str]:
        """The names in `tracker`, as a list."""
        return [self.tracker] if isinstance(self.tracker, str) else list(self.tracker or [])

    def conflicts(self) -> Iterator[Problem]:
        if self.minibatch_size is not None and self.batch_size % self.minibatch_size:
            yield Problem(
                ("train", "minibatch_size"),
                f"{self.minibatch_size} does not divide train.batch_size ({self.batch_size}).",
            )

    def inert(self) -> list[str]:
        names = {name.lower() for name in self.trackers}
        without_wandb = [] if "wandb" in names else ["entity_name", "group_name", "tags"]
        without_both = [] if {"tensorboard", "wandb"} & names else ["logging_dir"]
        unshown = [] if self.log_samples else ["log_samples_interval"]
        return [name for name in (*without_both, *without_wandb, *unshown) if self.changed(name)]


class DataConfig(Section):
    """The section `data`: where a run without a script finds its data and functions.

    Data is a .txt, .jsonl, .csv or .parquet file, `module:function`, `file.py:function`, or a hub dataset
    `name[:split]`.
    """

    section: ClassVar[str] = "data"

    prompts: PathText | list[Any] | None = None
    """Prompts to train on: a source, or a list of them (text, or a mapping with "prompt")."""
    eval_prompts: PathText | list[Any] | None = None
    """Prompts to evaluate on; null: the first of the training prompts."""
    samples: PathText | None = None
    """Source of the samples that are trained on."""
    rewards: PathText | None = None
    """Source of the rewards of the samples."""
    preferences: PathText | list[Any] | None = None
    """Pairs to learn from: a source, or a list of rows with "chosen" and "rejected" (and "prompt", "margin")."""
    eval_preferences: PathText | list[Any] | None = None
    """Pairs to evaluate on, in the same forms; null: none."""
    reward_fn: PathText | list[str] | None = None
    """Scores text: "module:function", "file.py:function", folder or hub name of a reward model; or a list of them."""
    judge: PathText | dict[str, Any] | None = None
    """What says which text is better: a registered judge ("name", or a mapping of it and options), or as reward_fn."""
    metric_fn: str | None = None
    """Function that measures what evaluation generates, in the same forms."""
    stop_sequences: list[str] = []
    """Texts at which a response ends."""
    logit_mask: str | None = None
    """Function that returns which token may follow which (True: allowed), in the same forms."""
