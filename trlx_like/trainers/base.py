"""The one loop. A trainer fills four verbs: `build`, `make_experience`, `loss`, `units`.

Gradients are those of the mean over all units of the global batch: the sum that `loss` returns is divided once, by the
units of every micro-batch on every process. So they do not depend on micro-batches, padding or the number of processes.

Model families, generation and text are left to `trainers/text.py`, evaluation to `trainers/evaluation.py`, files to
`checkpoint` and `tracking`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import RngState, TrainState, isolated_rng, seed_everything
from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.data import Experience, RolloutStore
from trlx_like.distributed import GradientAccumulator, World, make_accelerator
from trlx_like.errors import ConfigError, RewardError, SamplerError
from trlx_like.optim import make_optimizer, make_scheduler
from trlx_like.tracking import Trackers
from trlx_like.trainers.callbacks import Callback
from trlx_like.trainers.clock import Clock
from trlx_like.trainers.interrupt import Interrupted, StopRequest, stop_requests
from trlx_like.trainers.run import Progress, RunFolder, require
from trlx_like.trainers.scoring import Scoring

E = TypeVar("E", bound=Experience)
Metrics = dict[str, float]


@dataclass
class LossOutput:
    """What `loss` returns: everything summed over units, so that micro-batches and processes add up."""

    loss: Tensor  # []
    metrics: dict[str, Tensor] = field(default_factory=dict)  # each []; the log shows them divided by the units


class BaseRLTrainer(ABC, Generic[E]):
    """Base of all trainers.

    config: the complete configuration; `config.method` is this trainer's. reward_fn, metric_fn, stop_sequences,
    logit_mask, tokenizer, callbacks: as in `trlx_like.train`. data: prompts, eval_prompts, samples, rewards, ...,
    those that `uses` names. Raises ConfigError for options that this trainer cannot follow.
    """

    method_class: ClassVar[type[MethodConfig]]
    experience_class: type[E]
    offline: ClassVar[bool] = False
    """True: experience is made once, from data, and `train.epochs` are passes over it."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """The data arguments of `train` that this trainer takes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What `learn` cannot do without, of those and `reward_fn`; an offline trainer is not made without it either."""
    counted: ClassVar[tuple[str, ...]] = ()
    """Names of `counts`. Their totals over the global batch, and that of the units, are in `totals` during `loss`."""

    model: nn.Module
    tokenizer: Any

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: Sequence[str] = (),
        logit_mask: Tensor | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        **data: Any,
    ) -> None:
        if not isinstance(config.method, self.method_class):
            raise ConfigError(
                f"train.trainer ({type(self).__name__}) needs method.name: {self.method_class.__name__}, "
                f"not {config.method.name}."
            )
        self.config = config
        self.method: Any = config.method
        self.reward_fn, self.metric_fn = reward_fn, metric_fn
        self.stop_sequences = [stop_sequences] if isinstance(stop_sequences, str) else list(stop_sequences)
        if "" in self.stop_sequences:
            raise ConfigError("stop_sequences has an empty string, which would end every response at once.")
        self.logit_mask = logit_mask
        self.callbacks = list(callbacks)
        self.data = {name: value for name, value in data.items() if value is not None}
        if unused := sorted(set(self.data) - self.uses):
            known = ", ".join(sorted(self.uses)) or "no data"
            raise ConfigError(f"{type(self).__name__} cannot use {', '.join(unused)}; it takes {known}.")
        if self.offline:
            self._check_needs()
        self.accelerator = make_accelerator(config.backend)
        self.world = World(self.accelerator)
        self.device = self.accelerator.device
        self.local_batch_size = self.world.part(config.train.batch_size, "train.batch_size")
        seed_everything(config.train.seed)  # random weights are the same on every process
        self.clock = Clock()
        self.progress = Progress()
        self.state = TrainState(meta={"trainer": type(self).__name__})
        self.store: RolloutStore[E] = RolloutStore(self.experience_class)
        self.run = RunFolder(config, self.world)
        self.run.announce(type(self).__name__, self.device)
        self.scoring = Scoring(self)
        self.tracker: Trackers | None = None
        self.stop_request = StopRequest()
        self.stopping = False  # a signal has come to some process
        self.stopped = False  # a callback wants no more steps
        self.last_metrics: Metrics = {}
        self.round_steps: int | None = None  # optimiser steps of this round, once that is known
        self.totals: dict[str, float] = {}  # of the global batch of this step: "units" and what `counted` names
        self._pending: Metrics = {}  # of the last make_experience, logged with the round's first step
        self.build(tokenizer=tokenizer)
        self._prepare()

    @property
    def group(self) -> World:
        """The older name of `world`."""
        return self.world

    # The four verbs.

    @abstractmethod
    def build(self, tokenizer: Any = None) -> None:
        """Makes `self.model` and whatever produces samples. The optimiser is made from the model afterwards."""

    @abstractmethod
    def make_experience(self) -> Metrics:
        """Fills `self.store` with this process's share of a round; returns what there is to log about it.

        A RewardError or SamplerError must come on all processes, which then save the run as it was before the round.
        """

    @abstractmethod
    def loss(self, batch: E) -> LossOutput:
        """The loss of a micro-batch, summed over its units."""

    def units(self, batch: E) -> float:
        """How many units the loss of a micro-batch is summed over."""
        return len(batch)

    def counts(self, batch: E) -> dict[str, float]:
        """What else of a micro-batch `loss` has to know the total of, by the names in `counted`."""
        return {}

    # Hooks with defaults.

    @property
    def passes(self) -> int:
        """Passes over the store in a round."""
        return self.config.train.epochs if self.offline else 1

    def microbatches(self, batch: E) -> Iterator[E]:
        """Cuts a batch to what fits into memory, `train.minibatch_size` rows, of like length to save padding."""
        size = self.config.train.minibatch_size
        if size is None or size >= len(batch):
            yield batch
            return
        order = batch.lengths().argsort(stable=True)
        for start in range(0, len(batch), size):
            yield batch[order[start : start + size]].trim()

    def accept(self, metrics: Metrics) -> bool:
        """False drops the gradients of this step. `metrics` are of the global batch, so all processes agree."""
        return True

    def after_step(self, metrics: Metrics) -> None:
        """After each optimiser step, before it is logged."""

    def evaluate(self) -> Metrics:
        """Metrics of the model as it is. Called with random numbers of its own, so it changes nothing."""
        return {}

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes what is used after training, without the trainer's state, to a folder."""

    def generate(self, prompts: Sequence[Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Generate from prompts with the model as it is: token ids, or images from a diffusion model."""
        raise ConfigError(f"{type(self).__name__} trains a model that does not generate.")

    # The loop.

    def learn(self) -> Metrics:
        """Trains until `train.total_steps` or `train.epochs`; returns the last value of every metric.

        Ctrl-C and SIGTERM end it after the running step: the run is saved and the process exits with 130 or 143.
        """
        self._check_needs()
        if not self.progress.step and not self.run.resumed:
            self._seed()  # again, so that it does not matter what was drawn since the trainer was made
        self.run.resume(self.state)
        with isolated_rng(self.config.train.seed):  # some packages draw random numbers when they are imported
            self.tracker = self.run.open_trackers(self.progress)
        with stop_requests() as self.stop_request:
            try:
                self._call("on_train_begin")
                if self.progress.step == 0:
                    self._log(self._evaluated())
                while not self.finished:
                    self._run_round()
                if self.round_steps == 0 and self.progress.step:
                    self._end_without_step()
                self._call("on_train_end")
            finally:
                self.scoring.close()
                self.tracker.close()
        return self.last_metrics

    @property
    def finished(self) -> bool:
        progress, train = self.progress, self.config.train
        between_rounds = not progress.in_round or progress.position == self.round_steps
        no_more_rounds = between_rounds and progress.round >= (1 if self.offline else train.epochs)
        return self.stopped or no_more_rounds or progress.step >= train.total_steps

    def _run_round(self) -> None:
        if not self.progress.in_round or (self.offline and not len(self.store)):
            self._collect()
        for batch in self.round_batches():
            metrics = self.optimize(batch)
            self.progress.position += 1
            self._end_step(metrics)
            if self.finished or not self.progress.in_round:
                return
        self.end_round()

    def begin_round(self) -> None:
        """The store holds a new round's experience."""
        self.progress.round, self.progress.position, self.progress.in_round = self.progress.round + 1, 0, True

    def end_round(self) -> None:
        """No more batches of this round: the next step is on new experience."""
        self.progress.in_round = False

    def round_batches(self) -> Iterator[E | None]:
        """What is left of this round: its batches in their order; None where only other processes have data left."""
        done, passes = self.progress.position, self.passes
        generator = torch.Generator().manual_seed(self.config.train.seed * 1_000_003 + self.progress.round)
        batches = self.store.batches(self.local_batch_size, generator, passes)
        own = math.ceil(len(self.store) / self.local_batch_size) * passes
        # Agreed on before the first batch: a process that asks when its own have run out meets the others in a step.
        self.round_steps = self.world.max(own)
        yield from islice(batches, done, None)
        yield from [None] * (self.round_steps - max(own, done))

    def _collect(self) -> None:
        """A new round's experience. If that fails nothing of the round has happened, and the run is saved as it was."""
        progress = self.progress
        before = self.state.snapshot()
        try:
            self.store.clear()
            self.model.eval()
            self._pending = {}
            self._pending |= self.make_experience()
        except (Exception, Interrupted) as error:
            self.state.restore(before)
            together = self.world.size == 1 or isinstance(error, (Interrupted, RewardError, SamplerError))
            if progress.step and together:
                self.save()
            raise
        if progress.in_round:  # resumed: offline experience is made again, and has been accounted for
            self.state.restore(before)
            self._pending = {}
            return
        self.begin_round()
        self._call("on_experience", self._pending)

    def check_stop(self) -> None:
        """Raises Interrupted when a signal has come to any process. For long `make_experience`s, between chunks."""
        code = int(self.world.max(self.stop_request.code))
        if code:
            raise Interrupted(code)

    def optimize(self, batch: E | None) -> Metrics:
        """One optimiser step on this process's part of a global batch (None: it has none). Returns its metrics."""
        parts = [] if batch is None else [part.to(self.device) for part in self.microbatches(batch)]
        self.totals = self._totals(parts)
        units = max(self.totals["units"], 1.0)
        self.model.train()
        sums: defaultdict[str, float] = defaultdict(float)
        for part in parts:
            with self.clock("forward"), self.accelerator.autocast():
                output = self.loss(part)
            with self.clock("backward"):
                self.gradients.backward(output.loss / units)
            for name, value in {"losses/total_loss": output.loss, **output.metrics}.items():
                sums[name] += float(value.detach())
        metrics: Metrics = {name: value / units for name, value in self.world.sum_by_name(sums).items()}
        with self.clock("optimizer"):
            metrics["grad_norm"] = self.gradients.finish()
            self.gradients.step(self.optimizer, self.accept(metrics))
            self.optimizer.zero_grad(set_to_none=True)
            metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
            self.scheduler.step()
        self.progress.step += 1
        return metrics

    def _totals(self, parts: list[E]) -> dict[str, float]:
        """Units and counts of the global batch; whether some process was told to stop is asked on the way."""
        counts = [{"units": self.units(part), **self.counts(part)} for part in parts]
        names = ("units", *self.counted)
        *totals, stop = self.world.sum(
            [*(sum(count[name] for count in counts) for name in names), float(self.stop_request.code > 0)]
        )
        self.stopping = stop > 0
        return dict(zip(names, totals, strict=True))

    def _end_step(self, metrics: Metrics) -> None:
        train, step = self.config.train, self.progress.step
        self.after_step(metrics)
        metrics = {**self._pending, **metrics}
        self._pending = {}
        if self._call("on_step", metrics):
            self.stopped = True
        if step % train.eval_interval == 0 or self.finished:
            metrics |= self._evaluated()
        self._log({**metrics, **self.clock.lap()})
        stop = self.stopping or (self.world.size == 1 and self.stop_request.code > 0)
        if step % train.checkpoint_interval == 0 or self.finished or stop:
            self.save()
        if stop:
            raise Interrupted(self.stop_request.code or 143)

    def _end_without_step(self) -> None:
        """The last round had nothing to learn from: what the last step would have done, had it been known as such."""
        if self.progress.step % self.config.train.eval_interval:
            self._log(self._evaluated())
        if self.progress.step % self.config.train.checkpoint_interval:
            self.save()

    def _evaluated(self) -> Metrics:
        """Metrics of an evaluation; the best checkpoint is kept. Its random numbers are not the training's."""
        self.model.eval()
        seed = self.config.train.seed + 7919 * self.progress.step + self.world.rank
        with isolated_rng(seed), self.clock("evaluate"), torch.no_grad():
            metrics = self.evaluate()
        if metrics:
            if self.run.is_best(self.progress, metrics) and self.progress.step:
                self.save(self.run.directory / "best_checkpoint")
            self._call("on_evaluate", metrics)
        return metrics

    def _log(self, metrics: Metrics) -> None:
        if metrics and self.tracker is not None:
            self.tracker.log(metrics, self.progress.step)
        self.last_metrics |= metrics

    def _call(self, hook: str, *args: Any) -> bool:
        """Calls a hook of every callback; True if one of any process answered False."""
        if not self.callbacks:
            return False
        answers = [getattr(callback, hook)(self, *args) for callback in self.callbacks]
        return any(self.world.gather([any(answer is False for answer in answers)]))

    # Files.

    def save(self, directory: str | Path | None = None) -> None:
        """Publishes a checkpoint, all of it or nothing: by default `checkpoint_<step>` in the run folder."""
        path = self.run.save(self, directory)
        self._call("on_save", path)

    def load(self, directory: str | Path) -> None:
        """Continues from a checkpoint, or from the newest good one of a run folder."""
        self.run.load(directory, self.state)

    def push_to_store(self, experience: Sequence[E]) -> None:
        """Adds elements to the store."""
        self.store.push(experience)

    # Set-up.

    def _prepare(self) -> None:
        train = self.config.train
        self.model.to(self.device)
        self.world.same_weights([*self.model.parameters(), *self.model.buffers()])
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigError("model.num_layers_unfrozen (0) leaves this trainer nothing to train.")
        self.optimizer = self.accelerator.prepare_optimizer(make_optimizer(trained, self.config.optimizer))
        self.scheduler = make_scheduler(self.optimizer.optimizer, self.config.scheduler, train.total_steps)
        self.gradients = GradientAccumulator(self.world, trained, train.max_grad_norm)
        self.state.register("model", self.model, small=False)
        if train.save_optimizer:
            self.state.register("optimizer", self.optimizer, small=False)
            self.state.register("scheduler", self.scheduler)
        if self.accelerator.scaler is not None:
            self.state.register("scaler", self.accelerator.scaler)
        self.state.register("progress", self.progress)
        self.state.register("rng", RngState(), local=True)
        if not self.offline:
            self.state.register("store", self.store, local=True, small=False)
        self._seed()

    def _check_needs(self) -> None:
        require(self.config, self.needs, {"reward_fn": self.reward_fn, **self.data})

    def _seed(self) -> None:
        """Starts this process's random numbers."""
        seed_everything(self.config.train.seed + self.world.rank)
