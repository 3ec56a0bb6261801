"""The one loop. A trainer fills four verbs: `build`, `make_experience`, `loss`, `units`.

A trainer is its verbs and its parts. The parts are made with the `Run` and with values, and never see the trainer:
`optimise.py` makes a step, `rollouts.py` counts a round of samples, `scoring.py` calls the user's functions, `run.py`
keeps the run folder.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import RngState, isolated_rng
from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.data import Experience, RolloutStore
from trlx_like.errors import ConfigError, NonFiniteError, RewardError, SamplerError
from trlx_like.samplers.agreement import Agreement
from trlx_like.trainers.callbacks import Callback, call
from trlx_like.trainers.context import Metrics, OfRun, Run
from trlx_like.trainers.interrupt import Interrupted, stop_requests
from trlx_like.trainers.optimise import LossOutput, Optimisation, Units
from trlx_like.trainers.rollouts import Rollouts
from trlx_like.trainers.run import refuse_removed_hooks, require
from trlx_like.trainers.scoring import Scoring

__all__ = ["BaseRLTrainer", "LossOutput", "Metrics"]

E = TypeVar("E", bound=Experience)


class BaseRLTrainer(OfRun, ABC, Generic[E]):
    """Base of all trainers.

    Args:
        config: the complete configuration; `config.method` is this trainer's.
        reward_fn: as in `trlx_like.train`, like the next five.
        metric_fn: a function that measures what evaluation generates.
        stop_sequences: texts at which a response ends.
        logit_mask: bool [V, V], True where the second token may follow the first.
        tokenizer: in place of `tokenizer.tokenizer_path`.
        callbacks: called during training.
        data: prompts, eval_prompts, samples, rewards, ...: those that `uses` names.

    Raises:
        ConfigError: for options that this trainer cannot follow, and for data that it cannot use.
    """

    method_class: ClassVar[type[MethodConfig]]
    experience_class: type[E]
    offline: ClassVar[bool] = False
    """True: experience is made once, from data, and `train.epochs` are passes over it."""
    uses: ClassVar[frozenset[str]] = frozenset()
    """The data arguments of `train` that this trainer takes."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Which of them, and of `reward_fn`, `learn` cannot do without; an offline trainer is not made without them."""

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
        name = type(self).__name__
        refuse_removed_hooks(type(self))
        if not isinstance(config.method, self.method_class):
            needed = f"{self.method_class.__name__}, not {config.method.name}"
            raise ConfigError(f"train.trainer ({name}) needs method.name: {needed}.")
        self.config = config
        self.method: Any = config.method
        self.reward_fn, self.metric_fn = reward_fn, metric_fn
        self.stop_sequences = [stop_sequences] if isinstance(stop_sequences, str) else list(stop_sequences)
        if "" in self.stop_sequences:
            raise ConfigError("stop_sequences has an empty string, which would end every response at once.")
        self.logit_mask = logit_mask
        self.callbacks = list(callbacks)
        self.data = {name: value for name, value in data.items() if value is not None}
        if unused := ", ".join(sorted(set(self.data) - self.uses)):
            raise ConfigError(f"{name} cannot use {unused}; it takes {', '.join(sorted(self.uses)) or 'no data'}.")
        if self.offline:
            self._check_needs()
        self.run = Run(config, name)
        self.store: RolloutStore[E] = RolloutStore(self.experience_class)
        self.scoring = Scoring(self.run, reward_fn)
        self.rollouts = Rollouts(self.run, self.scoring)
        self.agreement = Agreement(self.world, config.sampler.engine, config.backend.mixed_precision)
        self.stopped = False  # a callback wants no more steps
        self.last_metrics: Metrics = {}
        self.round_steps: int | None = None  # optimiser steps of this round, once that is known
        self._stopping = False  # a signal has come to some process
        self._pending: Metrics = {}  # of the last make_experience, logged with the round's first step
        self.build(tokenizer=tokenizer)
        self.scoring.tokenizer = getattr(self, "tokenizer", None)
        self._prepare()

    # The four verbs.

    @abstractmethod
    def build(self, tokenizer: Any = None) -> None:
        """Make `self.model` and whatever produces samples. The optimiser is made from the model afterwards."""

    @abstractmethod
    def make_experience(self) -> Metrics:
        """Fill `self.store` with this process's share of a round, and return what to log about it.

        A RewardError or SamplerError must come on all processes, which then save the run as it was before the round.
        """

    @abstractmethod
    def loss(self, batch: E) -> LossOutput:
        """Return the loss of a micro-batch as sums over its units. It depends on the batch and the weights alone."""

    def units(self, batch: E) -> Units:
        """Count the units of a micro-batch: one number, or several by name if the loss has several terms."""
        return len(batch)

    # Hooks with defaults.

    @property
    def passes(self) -> int:
        """Passes over the store in a round."""
        return self.config.train.epochs if self.offline else 1

    def microbatches(self, batch: E) -> Iterator[E]:
        """Cut a batch to what fits into memory: `train.minibatch_size` rows of similar length."""
        for _, part in batch.microbatches(self.config.train.minibatch_size):
            yield part

    def accept(self, metrics: Metrics) -> bool:
        """Decide whether a step is made; False drops its gradients.

        The metrics are those of the global batch, so all processes agree. Where they have `policy/ratio_deviation`,
        the first step on fresh experience must find the policy that the samples came from.
        """
        if not self.offline and "policy/ratio_deviation" in metrics and self.progress.fresh:
            self.agreement.check_step(metrics["policy/ratio_deviation"], self.model)
        return True

    def after_step(self, metrics: Metrics) -> None:
        """Act after each optimiser step, before its metrics are logged."""

    def evaluate(self) -> Metrics:
        """Measure the model as it is. It is called with random numbers of its own, so it changes nothing."""
        return {}

    def evaluate_held_out(self, elements: Sequence[E]) -> Metrics:
        """Measure on this process's held-out elements what a step would log; return it under `eval/<name>`."""
        size, collate = self.run.microbatch_size, self.experience_class.collate
        parts = [collate(elements[start : start + size]) for start in range(0, len(elements), size)]
        metrics = self.optimisation.measure(parts, self.loss, self.units)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def save_pretrained(self, directory: str | Path) -> None:
        """Write what is used after training to a folder, without the trainer's state."""

    def generate(self, prompts: Sequence[Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Generate from prompts with the model as it is: token ids, or images from a diffusion model."""
        raise ConfigError(f"{type(self).__name__} trains a model that does not generate.")

    # The loop.

    def learn(self) -> Metrics:
        """Train until `train.total_steps` or `train.epochs`, and return the last value of every metric.

        Ctrl-C and SIGTERM end it after the running step: the run is saved and the process exits with 130 or 143.
        """
        self._check_needs()
        if not self.progress.step and not self.run.folder.resumed:
            self.run.seed()  # again, so that it does not matter what was drawn since the trainer was made
        self.run.folder.resume(self.state)
        with stop_requests() as self.run.stop_request, self.run.open_trackers(), closing(self.scoring):
            self._call("on_train_begin")
            if self.progress.step == 0:
                self._log(self._evaluated())
            while not self.finished:
                self._run_round()
            if self.round_steps == 0 and self.progress.step:  # nothing to learn from in the last round
                if self.progress.step % self.config.train.eval_interval:
                    self._log(self._evaluated())
                if self.progress.step % self.config.train.checkpoint_interval:
                    self.save()
            self._call("on_train_end")
        return self.last_metrics

    @property
    def finished(self) -> bool:
        """Whether no step is left to make."""
        progress, train = self.progress, self.config.train
        between_rounds = not progress.in_round or progress.position == self.round_steps
        no_more_rounds = between_rounds and progress.round >= (1 if self.offline else train.epochs)
        return self.stopped or no_more_rounds or progress.step >= train.total_steps

    def _run_round(self) -> None:
        if not self.progress.in_round or (self.offline and not len(self.store)):
            self._collect()
        for metrics in self.optimize_round():
            self._end_step(metrics)
            if self.finished or not self.progress.in_round:
                return
        self.end_round()

    def begin_round(self) -> None:
        """Note that the store holds a new round's experience."""
        self.progress.round, self.progress.position, self.progress.in_round = self.progress.round + 1, 0, True

    def end_round(self) -> None:
        """Take no more batches of this round: the next step is on new experience."""
        self.progress.in_round = False

    def optimize_round(self) -> Iterator[Metrics]:
        """Make the remaining optimiser steps of the current round, and yield the metrics of each."""
        for batch in self.round_batches():
            metrics = self.optimize(batch)
            self.progress.position += 1
            self.after_step(metrics)
            yield metrics

    def round_batches(self) -> Iterator[E | None]:
        """Yield the remaining batches of the current round, in order; None if only other processes have data left."""
        done, passes = self.progress.position, self.passes
        generator = torch.Generator().manual_seed(self.config.train.seed * 1_000_003 + self.progress.round)
        batches = self.store.batches(self.run.local_batch_size, generator, passes)
        own = math.ceil(len(self.store) / self.run.local_batch_size) * passes
        # Agreed on before the first batch: a process that asks when its own have run out meets the others in a step.
        self.round_steps = self.world.max(own)
        yield from islice(batches, done, None)
        yield from [None] * (self.round_steps - max(own, done))

    def optimize(self, batch: E | None) -> Metrics:
        """Make one step on this process's part of a global batch (None: it has none), and return its metrics."""
        parts = [] if batch is None else list(self.microbatches(batch))
        try:
            metrics, self._stopping = self.optimisation.step(parts, self.loss, self.units, self.accept)
        except (NonFiniteError, SamplerError):  # on all processes; the weights are as before the step
            if self.progress.step:
                self.save()
            raise
        return metrics

    def _collect(self) -> None:
        """Make a new round's experience. If that fails, nothing of the round has happened, and the run is saved."""
        progress = self.progress
        before = self.state.snapshot()
        self._pending = {}
        try:
            self.store.clear()
            self.rollouts.begin()
            self.model.eval()
            made = self.make_experience()
            self._pending = {**self.rollouts.metrics(), **made}
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

    def _end_step(self, metrics: Metrics) -> None:
        train, step = self.config.train, self.progress.step
        metrics = {**self._pending, **metrics}
        self._pending = {}
        if self._call("on_step", metrics):
            self.stopped = True
        if step % train.eval_interval == 0 or self.finished:
            metrics |= self._evaluated()
        self._log({**metrics, **self.clock.lap()})
        code = self.run.stop_request.code
        stop = self._stopping or (self.world.size == 1 and code > 0)
        if step % train.checkpoint_interval == 0 or self.finished or stop:
            self.save()
        if stop:
            raise Interrupted(code or 143)

    def _evaluated(self) -> Metrics:
        """Evaluate with random numbers that are not the training's, and keep the best checkpoint."""
        self.model.eval()
        seed = self.config.train.seed + 7919 * self.progress.step + self.world.rank
        with isolated_rng(seed), self.clock("evaluate"), torch.no_grad():
            metrics = self.evaluate()
        if metrics:
            if self.run.folder.is_best(self.progress, metrics) and self.progress.step:
                self.save(self.run.folder.directory / "best_checkpoint")
            self._call("on_evaluate", metrics)
        return metrics

    def _log(self, metrics: Metrics) -> None:
        self.run.log(metrics)
        self.last_metrics |= metrics

    def _call(self, hook: str, *args: Any) -> bool:
        """Call a hook of every callback; return whether one of any process answered False."""
        return bool(self.callbacks) and any(self.world.gather([call(self.callbacks, hook, self, *args)]))

    # Files.

    def save(self, directory: str | Path | None = None) -> None:
        """Publish a checkpoint, all of it or nothing: by default `checkpoint_<step>` in the run folder."""
        path = self.run.folder.save(self.state, self.save_pretrained, self.progress.step, directory)
        self._call("on_save", path)

    def load(self, directory: str | Path) -> None:
        """Continue from a checkpoint, or from the newest good one of a run folder."""
        self.run.folder.load(directory, self.state)

    def push_to_store(self, experience: Sequence[E]) -> None:
        """Add elements to the store."""
        self.store.push(experience)

    @property
    def optimizer(self) -> Any:
        """The optimiser of the trained parameters, as accelerate wraps it."""
        return self.optimisation.optimizer

    def _prepare(self) -> None:
        """Bring the model to the device, make the optimiser, and register what checkpoints hold."""
        self.model.to(self.device)
        self.world.same_weights([*self.model.parameters(), *self.model.buffers()])
        self.state.register("model", self.model, small=False)
        self.optimisation = Optimisation(self.run, self.model)
        self.state.register("progress", self.progress)
        self.state.register("rng", RngState(), local=True)
        if not self.offline:
            self.state.register("store", self.store, local=True, small=False)
        self.run.seed()

    def _check_needs(self) -> None:
        require(self.config, self.needs, {"reward_fn": self.reward_fn, **self.data})
