"""What `trlx-like check --deep` does: makes one round and one optimizer step of a run, elsewhere, and measures them.

The run is the real one, by the public loop: `learn` with a callback that ends it after the first step, in a folder that
is deleted afterwards. So whatever a run would stumble over on its way to its first checkpoint, the checkpoint included,
is found. The run folder is not touched, and no tracker is opened. Left out on purpose: several processes.
"""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trlx_like import api
from trlx_like.check import quiet
from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.tracking.folder import read_rows
from trlx_like.trainers.callbacks import Callback

FEW = 0.001
"""Probability of EOS at the beginning of a response below which it is called out of reach."""


@dataclass
class Watch(Callback):
    """Measure the first round and step of a run, and end the run after them.

    Attributes:
        seconds: Seconds of each part of the run.
        metrics: What the parts logged.
        bytes: Size of the checkpoint.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    since: float = field(default_factory=time.perf_counter)

    def on_train_begin(self, trainer: Any) -> None:
        self._lap("loading")

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)
        first = self.seconds.get("evaluation")
        self._lap("evaluation")
        if first is not None:  # a later one may be followed by the best checkpoint, before this is called
            self.seconds["evaluation"] = first

    def on_experience(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        trainer.stopped = True  # after the first step, or after a round that has none
        self.metrics.update(metrics)
        self._lap("round")

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.metrics.update(metrics)
        self._lap("step")

    def on_save(self, trainer: Any, path: Path) -> None:
        self.bytes = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        self._lap("checkpoint")

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.since = now - self.since, now


def deep_check(config: TRLConfig, **given: Any) -> list[str]:
    """Make one round and one step of a run in another folder, and describe them and the run.

    Args:
        config: The complete configuration.
        given: As in `api.make_trainer`.

    Returns:
        One line for each thing that was looked at.

    Raises:
        TrlxError: What the run would raise, and if its checkpoints do not fit on the disk.
    """
    run_folder = Path(config.train.checkpoint_dir)
    disk = next(place for place in (run_folder.absolute(), *run_folder.absolute().parents) if place.is_dir())
    from trlx_like.trainers.base import BaseRLTrainer

    # On the disk of the run, but never in its folder.
    beside = disk.parent if disk == run_folder.absolute() else disk
    with tempfile.TemporaryDirectory(
        prefix=".trlx_like_check_", dir=beside if os.access(beside, os.W_OK) else None
    ) as folder:
        watch = Watch()
        elsewhere = copy.deepcopy(config.elsewhere(folder))  # a loaded model, and its optimizer, stay as they are
        with quiet():
            trainer = api.make_trainer(elsewhere, **{**given, "callbacks": [watch]})
        if not isinstance(trainer, BaseRLTrainer):
            raise ConfigError(f"train.trainer ({config.train.trainer}) is no BaseRLTrainer; check it without --deep.")
        with quiet(), redirect_stdout(sys.stderr):  # where the progress of the run is no part of the answer
            trainer.learn()
        phases = _phases(Path(folder))
    lines = [
        *_model(trainer),
        *_ending(trainer, watch.metrics),
        *_reward(trainer, watch.metrics, phases),
        _time(watch.seconds, phases),
        _memory(trainer),
    ]
    if "step" not in watch.seconds:
        return [*lines, "plan: the first round made no step: nothing of it can be learned from"]
    plan = Plan.of(trainer, watch.seconds)
    return [*lines, plan.words(), _disk(plan, watch.bytes, disk)]


def _phases(folder: Path) -> Mapping[str, float]:
    """Add up the seconds of each phase of the run, such as generate and reward, from its metrics.jsonl."""
    found: Counter[str] = Counter()
    for row in read_rows(folder / "metrics.jsonl"):
        found.update({name.removeprefix("time/"): row[name] for name in row if name.startswith("time/")})
    del found["elapsed"]
    return found


def _model(trainer: Any) -> list[str]:
    """Describe the weights. That they are finite and the model is causal was checked when it was loaded."""
    parameters = list(trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    formats = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    kind = {"causal": ", causal", "seq2seq": ", encoder-decoder"}.get(trainer.config.model.model_arch_type, "")
    total = sum(parameter.numel() for parameter in parameters)
    return [f"model: {total:,} weights, {trained:,} trained, {' and '.join(formats)}, all finite{kind}"]


def _ending(trainer: Any, metrics: Mapping[str, float]) -> list[str]:
    """Tell whether responses end by themselves; nothing for a trainer that generates no text.

    Raises:
        ConfigError: If the tokenizer's EOS is none of the model's tokens, or `logit_mask` never allows it.
    """
    if not hasattr(trainer, "sampler") or getattr(trainer, "tokenizer", None) is None:
        return []
    eos, vocabulary = trainer.tokenizer.eos_token_id, trainer.model.lm.get_output_embeddings().weight.shape[0]
    if eos >= vocabulary:
        raise ConfigError(f"tokenizer: EOS has the id {eos}, and the model computes {vocabulary} logits: no text ends.")
    allowed = getattr(trainer.model, "allowed", None)
    if allowed is not None and not allowed[:, eos].any():
        raise ConfigError(f"logit_mask allows EOS (id {eos}) after no token: no text ends.")
    words = f"EOS: {trainer.tokenizer.eos_token!r} (id {eos})"
    finished = metrics.get("rollout/finished_fraction")
    if finished is not None:
        words += f", reached by {finished:.0%} of the round's responses"
    if not finished:
        likely = _probability_of_eos(trainer, eos)
        words += f", probability {likely:.2g} at the beginning of a response"
        words += ". Responses will be as long as max_new_tokens" if likely < FEW else ""
    return [words]


def _probability_of_eos(trainer: Any, eos: int) -> float:
    """Return the probability that a response to a short text is empty."""
    import torch

    ids = torch.tensor([trainer.tokenizer("a").input_ids or [eos]], device=trainer.device)
    decoder = {"decoder_input_ids": ids[:, :1]} if trainer.config.model.model_arch_type == "seq2seq" else {}
    with torch.no_grad():
        logits = trainer.model.lm(input_ids=ids, **decoder).logits[0, -1]
    return float(logits.float().softmax(dim=0)[eos])


def _reward(trainer: Any, metrics: Mapping[str, float], phases: Mapping[str, float]) -> list[str]:
    """Describe what the reward function gave to outputs of the model."""
    if "rollout/score_mean" not in metrics and "reward/mean" not in metrics:
        return []
    mean = metrics.get("rollout/score_mean", metrics.get("reward/mean", math.nan))
    deviation = metrics.get("rollout/score_std", metrics.get("reward/std", math.nan))
    words = f"reward: mean {mean:.4g}, standard deviation {deviation:.4g}"
    if metrics.get("rollout/abstained_fraction"):
        words += f", {metrics['rollout/abstained_fraction']:.0%} without a reward"
    words += f", {_seconds(phases.get('reward', 0.0))} in a round and two evaluations"
    same = deviation == 0 and metrics.get("rollout/samples", 2) > 1
    return [words + (". All rewards are the same: there is nothing to learn from" if same else "")]


def _time(seconds: Mapping[str, float], phases: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {_seconds(value)}" for name, value in seconds.items())
    most = sorted(phases.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name} {_seconds(value)}" for name, value in most)
    return f"time: {parts}" + (f" (most of it: {shares})" if shares else "")


def _memory(trainer: Any) -> str:
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    words = f"memory: peak {_size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}"
    if trainer.device.type == "cuda":
        words += f", on the GPU {_size(torch.cuda.max_memory_allocated())}"
    return words


@dataclass
class Plan:
    """Hold how long a run will be and what it will write.

    Attributes:
        rounds: Rounds; passes over the data of an offline method.
        steps: Optimizer steps.
        evaluations: Evaluations, the one before training included.
        checkpoints: Checkpoints that are written, and the most of them that are kept at one time.
        kept: See `checkpoints`.
        seconds: Estimated time.
    """

    rounds: int
    steps: int
    evaluations: int
    checkpoints: int
    kept: int
    seconds: float

    @classmethod
    def of(cls, trainer: Any, seconds: Mapping[str, float]) -> Plan:
        """Plan a run by its first round and step."""
        train = trainer.config.train
        a_round = max(trainer.round_steps or 0, 1)
        rounds = 1 if trainer.offline else train.epochs
        steps = min(train.total_steps, a_round * rounds)
        rounds = min(rounds, math.ceil(steps / a_round))
        evaluations = (1 + math.ceil(steps / train.eval_interval)) if "evaluation" in seconds else 0
        checkpoints = math.ceil(steps / train.checkpoint_interval)
        # The oldest one goes after the newest is complete; the best one is a copy, which is replaced in the same way.
        kept = min(checkpoints, (train.keep_checkpoints or checkpoints) + 1)
        kept += 2 if train.save_best and evaluations else 0
        spent = {"round": rounds, "step": steps, "evaluation": evaluations, "checkpoint": checkpoints}
        total = seconds.get("loading", 0.0) + sum(seconds.get(part, 0.0) * count for part, count in spent.items())
        passes = train.epochs if trainer.offline else rounds
        return cls(passes, steps, evaluations, checkpoints, kept, total)

    def words(self) -> str:
        """Return the plan in one line."""
        return (
            f"plan: at most {self.rounds} rounds or passes, {self.steps} steps, {self.evaluations} evaluations and "
            f"{self.checkpoints} checkpoints in about {_seconds(self.seconds)}"
        )


def _disk(plan: Plan, checkpoint: int, disk: Path) -> str:
    """Compare the space that all checkpoints need at one time with what is free. ConfigError if it is less."""
    needed, free = checkpoint * plan.kept, shutil.disk_usage(disk).free
    words = f"a checkpoint has {_size(checkpoint)}, at most {plan.kept} at one time need {_size(needed)}"
    if needed > free:
        raise ConfigError(
            f"train.checkpoint_dir: {words}, and {_size(free)} are free on the disk of {disk}. Set "
            "train.keep_checkpoints, or a larger train.checkpoint_interval."
        )
    return f"disk: {words}; {_size(free)} are free"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
