"""The sections about the run: `train` and `data`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from trlx_like.config.auto import AUTO, CountOrAuto
from trlx_like.config.model import PathText
from trlx_like.config.problems import Accepts, Problem, at, only
from trlx_like.config.registries import TRAINERS
from trlx_like.config.resume import Applied, OfData, OfRound, OfStart, OfWeights, OnResume
from trlx_like.config.section import Section
from trlx_like.errors import RegistryError
from trlx_like.redact import secrets_in


def _known_trainer(name: str) -> str:
    try:
        TRAINERS.canonical(name)
    except RegistryError as error:
        raise ValueError(str(error)) from None
    return name


def _steps(value: Any) -> Any:
    if isinstance(value, float) and 0 < value < 1:
        raise ValueError(f"must count optimizer steps, got {value}; write that share of train.total_steps.")
    return value


def _early_stopping(options: dict[str, Any] | None) -> bool:
    if options is None:
        return True
    patience, delta, metric = options.get("patience"), options.get("min_delta", 0.0), options.get("metric", "")
    whole = isinstance(patience, int) and not isinstance(patience, bool) and patience >= 1
    number = isinstance(delta, int | float) and not isinstance(delta, bool) and 0 <= delta < math.inf
    known = options.keys() <= {"metric", "mode", "patience", "min_delta"}
    return whole and number and known and isinstance(metric, str) and options.get("mode", "max") in ("max", "min")


_FOLDER = only(lambda path: path.strip() and "\0" not in path)
_REPOSITORY = only(re.compile(r"[\w.-]+/[\w.-]+", re.ASCII).fullmatch)
Interval = Annotated[int, Field(ge=1), BeforeValidator(_steps)]


class TrainConfig(Section):
    """Configure the training loop, checkpoints and logging: the section `train`."""

    total_steps: Applied[int] = Field(ge=1)
    """Number of optimizer steps after which training stops."""
    seq_length: OfData[CountOrAuto] = AUTO
    """Most tokens of a prompt and its response together, not for images; auto: the model's positions, at most 1024."""
    epochs: Applied[int] = Field(ge=1)
    """Number of rounds (online methods) or passes over the data (offline methods) after which training stops."""
    batch_size: OfRound[int] = Field(ge=1)
    """Number of samples in each optimizer step, over all processes."""
    minibatch_size: Applied[int | None] = Field(default=None, ge=1)
    """Number of samples in each forward and backward pass, per process; null: all. It does not change the gradient."""
    group_by_length: OfRound[bool] = False
    """Put samples of similar lengths into a batch, which saves padding: sorted within windows of 100 batches."""
    keep_trunk: Applied[bool] = True
    """Keep what the frozen lower blocks of a model make of a sample, so that they run once for it; needs memory."""
    trainer: OfWeights[Annotated[str, AfterValidator(_known_trainer)]]
    """Registered name of the trainer, such as PPOTrainer; `trlx-like list trainers` shows all."""
    trainer_kwargs: OfWeights[dict[str, Any]] = {}
    """More keyword arguments for the trainer class."""
    pipeline: OfData[str] = "PromptPipeline"
    """Registered name of the pipeline that turns prompts into batches."""

    probe_memory: Applied[bool] = False
    """Run the longest sample that the run may meet first, so that it runs out of memory at once or never."""

    checkpoint_interval: Applied[Interval] = 1000
    """Number of optimizer steps between two checkpoints."""
    eval_interval: Applied[Interval] = 100
    """Number of optimizer steps between two evaluations."""
    checkpoint_dir: OfStart[Annotated[PathText, _FOLDER, Accepts("the path of a folder")]] = "ckpts"
    """Folder of the run: checkpoints, metrics, report. Files there that no run has made are left alone."""
    keep_checkpoints: Applied[int | None] = Field(default=None, ge=1)
    """Number of newest checkpoints to keep, beside the best one; null: keep all."""
    save_best: Applied[bool] = True
    """Keep a copy of the checkpoint with the best evaluation."""
    best_metric: Annotated[str | None, OnResume("the best value so far is of the other metric")] = None
    """Metric that tells the best checkpoint; null: the first of reward/mean, metrics/reward, eval/losses/total_loss."""
    best_mode: Annotated[Literal["max", "min"] | None, OnResume("the best value so far is of the other mode")] = None
    """Whether `best_metric` should be high or low; null: min for losses and perplexities, max for all others."""
    early_stopping: Applied[
        Annotated[
            dict[str, Any] | None,
            only(_early_stopping),
            Accepts(
                "a mapping of patience (evaluations) and, if wanted, metric, mode (min or max), min_delta; or null"
            ),
            WithJsonSchema({"type": ["object", "null"], "required": ["patience"]}),
        ]
    ] = None
    """End the run once `patience` evaluations in a row did not improve `metric` by more than `min_delta`."""
    save_optimizer: OfWeights[bool] = True
    """Save the optimizer's state with each checkpoint. Without it a resumed run keeps only the schedule."""
    resume_from_checkpoint: OfStart[PathText | None] = None
    """Checkpoint to continue from; auto: the newest one in `checkpoint_dir`, if any; null: start anew."""
    force_resume: OfStart[bool] = False
    """Resume even if options or data have changed that a resume refuses to change."""
    on_checkpoint_error: Applied[Literal["stop", "continue"]] = "stop"
    """Response to a disk that refuses a checkpoint; continue: warn, and try again at the next interval."""
    async_save: Applied[bool] = False
    """Copy the state to CPU memory and write checkpoints beside training, all but the last one; needs that memory."""
    push_to_hub: OfStart[Annotated[str, _REPOSITORY, Accepts("owner/name")] | None] = None
    """Repository of the Hugging Face Hub to upload the model to when training ends; a new one is private."""
    rollout_logging_dir: Applied[PathText | None] = None
    """Folder for the prompts, responses and scores of every round as text files; null: write none."""

    log_samples: Applied[int] = Field(default=4, ge=0)
    """Number of prompts of a round to show in the logs, with all their responses; 0: none."""
    log_samples_interval: Applied[int] = Field(default=10, ge=1)
    """Minimum number of optimizer steps between two rounds with samples in the logs; 1: every round."""
    tracker: Applied[str | list[str] | None] = None
    """Registered name of a tracker such as wandb, or a list of names; null: only the file metrics.jsonl."""
    logging_dir: Applied[PathText | None] = None
    """Folder for the files of TensorBoard and wandb; null: `checkpoint_dir`."""
    project_name: Applied[str] = "trlx_like"
    """Project name that trackers show the run under."""
    run_name: Applied[str | None] = None
    """Name of the run for trackers; null: the name of its folder."""
    entity_name: Applied[str | None] = None
    """Team or user name for wandb; null: the default of the account."""
    group_name: Applied[str | None] = None
    """Group of runs for wandb; null: none."""
    tags: Applied[list[str]] = []
    """Tags for wandb."""
    tracker_kwargs: Applied[dict[str, dict[str, Any]]] = {}
    """Further arguments of a tracker's start, by its name, such as `wandb: {notes: a try}` for `wandb.init`."""

    seed: Annotated[int, OnResume("the random numbers of the run follow from it")] = Field(
        default=1000, ge=0, le=2**32 - 1
    )
    """Seed of all random numbers of the run."""
    max_empty_rounds: Applied[int] = Field(default=100, ge=1)
    """Number of rounds in a row without a sample to learn from, such as ties alone, after which training stops."""
    max_grad_norm: Applied[float | None] = Field(default=1.0, gt=0)
    """Maximum norm that the gradient is clipped to; null: no clipping."""
    max_nonfinite_steps: Applied[int] = Field(default=3, ge=0)
    """Number of steps in a row that may have a NaN or infinite loss or gradient. Such a step changes no weight."""
    undo_nonfinite_updates: Applied[bool] = True
    """Copy weights and optimizer state before a step that could make them NaN or infinite, to undo it; needs memory."""
    stop_kl: Applied[float | None] = Field(default=None, gt=0)
    """KL to the reference per response (`policy/kl`) above which the run counts as diverged; null: no limit."""
    on_divergence: Applied[Literal["warn", "stop", "rollback"]] = "warn"
    """Response to entropy 0, KL above `stop_kl`, or loss 100 times its median; rollback: to the newest checkpoint."""
    rollback_lr_factor: Applied[float] = Field(default=0.5, gt=0, le=1)
    """Factor of the learning rate after each rollback."""
    max_rollbacks: Applied[int] = Field(default=3, ge=1)
    """Number of rollbacks after which the run ends at the next sign of divergence."""
    reward_on_main_process: Applied[bool] = False
    """Call the reward function on the main process only, with the samples of all processes, as trlX does."""

    @property
    def trackers(self) -> list[str]:
        """Return the names in `tracker` as a list."""
        return [self.tracker] if isinstance(self.tracker, str) else list(self.tracker or [])

    def conflicts(self) -> Iterator[Problem]:
        if self.minibatch_size is not None and self.batch_size % self.minibatch_size:
            yield at(
                "train.minibatch_size", f"{self.minibatch_size} does not divide train.batch_size ({self.batch_size})."
            )
        for name in self.tracker_kwargs:
            if name.lower() not in map(str.lower, self.trackers):
                yield Problem(("train", "tracker_kwargs", name), f"train.tracker ({self.tracker}) does not name it.")

    def acting(self) -> dict[str, bool]:
        trackers = {name.lower() for name in self.trackers}
        return {
            "logging_dir": bool({"tensorboard", "wandb"} & trackers),
            **dict.fromkeys(("entity_name", "group_name", "tags"), "wandb" in trackers),
            "log_samples_interval": self.log_samples > 0,
            **dict.fromkeys(("rollback_lr_factor", "max_rollbacks"), self.on_divergence == "rollback"),
            **dict.fromkeys(("best_metric", "best_mode"), bool(self.save_best or self.early_stopping)),
        }


class DataConfig(Section):
    """Name the data and functions of a run that has no script: the section `data`.

    Data is a .txt, .jsonl, .csv or .parquet file, `module:function`, `file.py:function`, a hub dataset `name[:split]`,
    a mapping of one of these as `path` with the options of `datasets.load_dataset`, or a mapping with a list as `mix`.
    """

    prompts: OfData[PathText | list[Any] | dict[str, Any] | None] = None
    """Prompts to train on: a data source, or a list of prompts (texts, or mappings with the key "prompt")."""
    eval_prompts: OfData[PathText | list[Any] | dict[str, Any] | None] = None
    """Prompts to evaluate on, in the same forms; null: the first `train.batch_size` training prompts."""
    samples: OfData[PathText | dict[str, Any] | None] = None
    """Data source of the samples that an offline method learns from."""
    eval_samples: OfData[PathText | dict[str, Any] | None] = None
    """Data source of samples to measure the loss and the perplexity on; null: none."""
    rewards: OfData[PathText | dict[str, Any] | None] = None
    """Data source of the rewards of these samples, in the same order; null: the column "reward" of the samples."""
    preferences: OfData[PathText | list[Any] | dict[str, Any] | None] = None
    """Preference pairs: a data source, or a list of rows with "chosen", "rejected" and often "prompt", "margin"."""
    eval_preferences: OfData[PathText | list[Any] | dict[str, Any] | None] = None
    """Preference pairs to evaluate on, in the same forms; null: none."""
    eval_split: OfData[float | None] = Field(default=None, gt=0, lt=1)
    """Fraction of the rows to hold out for evaluation, the same rows for each seed; null: none."""
    columns: OfData[dict[str, str]] = {}
    """Columns of the data by the names that they have here, such as prompt: question and reference: answer."""
    reward_fn: Applied[PathText | dict[str, Any] | list[str | dict[str, Any]] | None] = None
    """Reward function ("module:function", "file.py:function", name with options), reward model, or a list of these."""
    judge: Applied[PathText | dict[str, Any] | None] = None
    """Judge that compares responses: a registered name, a mapping of name and options, or as `reward_fn`."""
    metric_fn: Applied[str | None] = None
    """Function that computes metrics of generated text in evaluation: "module:function" or "file.py:function"."""
    stop_sequences: Applied[list[str]] = []
    """Texts that end a response when they are generated."""
    logit_mask: Applied[str | None] = None
    """Function that returns a bool table [V, V] (previous, next token; true: allowed), as "module:function"."""

    def conflicts(self) -> Iterator[Problem]:
        for name, spec in {"judge": self.judge, "reward_fn": self.reward_fn}.items():
            for place in secrets_in(spec):
                yield Problem(
                    ("data", name, *place),
                    "looks like a secret, which has no place in a file. Put it into an environment variable, and name "
                    f"the variable as data.{name}.api_key_env.",
                )
