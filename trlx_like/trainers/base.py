"""The training loop. An algorithm implements the methods in `verbs.py`: `build`, `make_experience`, `loss`, `units`.

The work is done by parts, which get the `Run` and values, and never the trainer: `optimise.py` makes a step,
`rollouts.py` counts a round of samples, `scoring.py` calls the user's functions, `run.py` manages the run folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trlx_like.checkpoint import RngState, isolated_rng
from trlx_like.config import TRLConfig
from trlx_like.data import RolloutStore
from trlx_like.errors import DivergenceError, NonFiniteError, RewardError, SamplerError, TrlxError
from trlx_like.models.finite import first_nonfinite
from trlx_like.models.merging import weights_for_rate
from trlx_like.optim import learning_rate_for
from trlx_like.samplers.agreement import Agreement
from trlx_like.trainers.best import ended_by, exhausted, note_best
from trlx_like.trainers.callbacks import Callback, call, checked
from trlx_like.trainers.checks import refuse_functions, refuse_unused, require, takes_a_config
from trlx_like.trainers.context import Metrics, Run
from trlx_like.trainers.divergence import DivergenceWatch
from trlx_like.trainers.empty import note_empty
from trlx_like.trainers.interrupt import Interrupted, stop_requests
from trlx_like.trainers.optimise import LossOutput, Optimisation
from trlx_like.trainers.probe import ProbeMemory
from trlx_like.trainers.pushing import PushToHub
from trlx_like.trainers.rollouts import Rollouts
from trlx_like.trainers.scoring import Scoring
from trlx_like.trainers.settling import settled
from trlx_like.trainers.verbs import E, Verbs

__all__ = ["BaseRLTrainer", "LossOutput", "Metrics"]

logger = logging.getLogger(__name__)


class BaseRLTrainer(Verbs[E]):
    """Run the training loop, and evaluate, save and resume; the base class of all trainers.

    Args:
        config: The complete configuration; `config.method` has the options of this trainer.
        reward_fn: Scores samples, see `trlx_like.train`.
        metric_fn: Measures the text or images that evaluations generate, see `trlx_like.train`.
        stop_sequences: Strings that end a response.
        logit_mask: True where the second token may follow the first. [V, V] bool
        tokenizer: A tokenizer to use in place of `tokenizer.tokenizer_path`.
        callbacks: `Callback`s to call during training.
        data: Data arguments of `trlx_like.train`, such as prompts; `uses` lists those that this trainer takes.

    Raises:
        ConfigError: For options that this trainer cannot follow, and for data that it cannot use.
    """

    @takes_a_config
    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: Sequence[str] | None = (),
        logit_mask: Tensor | None = None,
        tokenizer: Any = None,
        callbacks: Sequence[Callback] = (),
        **data: Any,
    ) -> None:
        config = settled(config, data)
        self.config, self.method = config, config.method
        self.reward_fn, self.metric_fn = reward_fn, metric_fn
        self.stop_sequences = [stop_sequences] if isinstance(stop_sequences, str) else list(stop_sequences or ())
        self.logit_mask = logit_mask
        own = [*[ProbeMemory()] * config.train.probe_memory, *[PushToHub()] * bool(config.train.push_to_hub)]
        self.callbacks = [*checked(callbacks), *own]
        self.data = {name: value for name, value in data.items() if value is not None}
        refuse_unused(type(self), dict(sorted(self.data.items())), self.stop_sequences)
        if self.offline:
            require(config, self.needs, {"reward_fn": reward_fn, **self.data})
        given = {"reward_fn": reward_fn, "metric_fn": metric_fn, **self.data}
        run = self.run = Run(config, type(self).__name__, given)
        self.accelerator, self.device, self.world = run.accelerator, run.device, run.world
        self.clock, self.progress, self.state = run.clock, run.progress, run.state
        self.store: RolloutStore[E] = RolloutStore(self.experience_class)
        self.scoring = Scoring(self.run, reward_fn)
        self.rollouts = Rollouts(self.run, self.scoring)
        self.agreement = Agreement(self.world, config.sampler.engine, config.backend.mixed_precision)
        self.stopped = False  # a callback wants no more steps
        self.last_metrics: Metrics = {}
        self.round_steps: int | None = None  # optimiser steps of this round, once that is known
        self._stopping = 0  # exit code after a process has received a signal to stop
        self._pending: Metrics = {}  # metrics of the last make_experience, logged with the round's first step
        self.build(tokenizer=tokenizer)
        self.scoring.tokenizer = getattr(self, "tokenizer", None)
        self._prepare()

    # The loop.

    def learn(self, **functions: Any) -> Metrics:
        """Train until `train.total_steps` or `train.epochs`, and return the last value of every metric.

        Ctrl-C and SIGTERM end it after the running step: the run is saved and the process exits with 130 or 143.

        Args:
            functions: None; those of trlX's `learn` are refused with the callback in their place.
        """
        refuse_functions(functions)
        require(self.config, self.needs, {**vars(self), **self.data})
        if not self.progress.step and not self.run.folder.resumed:
            self.run.seed()  # again, so that random numbers drawn since the trainer was made do not matter
        with (
            self.run.heartbeat.watching(),
            stop_requests() as self.run.stop_request,
            self.run.held(),
            closing(self.scoring),
        ):
            while True:
                try:
                    self._train()
                    return self.last_metrics
                except DivergenceError as error:  # on all processes
                    self.divergence_watch.roll_back(error)
                    self._pending, self.round_steps = {}, None

    def _train(self) -> None:
        """Train from the current step to the end."""
        began = self.progress.step
        with self.run.open_trackers():
            self._call("on_train_begin")
            if self.progress.step == 0:
                self._log(self._evaluated())
            while not self.finished:
                for _ in self._run_round():
                    pass
            if self.round_steps == 0:  # nothing to learn from in the last round
                step, train = self.progress.step, self.config.train
                self._log({**self._pending, **(self._evaluated() if step % train.eval_interval else {})})
                if step % train.checkpoint_interval:
                    self.save()
            self.run.folder.saving.wait()
            if began and self.progress.step == began and self.world.main:
                option = ended_by(self.config.train, self.progress)
                logger.info("The run is finished: %s ended it at step %d. Raise that to go on.", option, began)
            self._call("on_train_end")

    @property
    def finished(self) -> bool:
        """Whether training is complete."""
        progress, train = self.progress, self.config.train
        between_rounds = not progress.in_round or progress.position == self.round_steps
        no_more_rounds = between_rounds and progress.round >= (1 if self.offline else train.epochs)
        ended = progress.step >= train.total_steps or progress.empty_rounds >= train.max_empty_rounds
        return self.stopped or exhausted(train, progress) or no_more_rounds or ended

    def _run_round(self) -> Iterator[Metrics]:
        """Make experience if there is none, then the round's remaining steps, and yield the metrics of each."""
        if not self.progress.in_round or (self.offline and not len(self.store)):
            self._collect()
        for metrics in self.optimize_round():
            self._end_step(metrics)
            yield metrics
            if self.finished or not self.progress.in_round:
                return
        self.end_round()

    def begin_round(self) -> None:
        """Start a round, after its experience was put into the store."""
        self.store.join(self.world.gather, self.world.size)
        self.progress.round, self.progress.position, self.progress.in_round = self.progress.round + 1, 0, True
        self._pending |= note_empty(self.run, len(self.store))
        self.run.ledger.close_round()

    def end_round(self) -> None:
        """End the round early: the next step is on new experience."""
        self.progress.in_round = False

    def optimize_round(self) -> Iterator[Metrics]:
        """Make the remaining optimiser steps of the current round, and yield the metrics of each."""
        for batch in self.round_batches():
            metrics = self.optimize(batch)
            self.progress.position += 1
            self.after_step(metrics)
            yield metrics

    def round_batches(self) -> Iterator[E | None]:
        """Yield this process's parts of the round's remaining batches, in order; None if it has no part of one."""
        train, world = self.config.train, self.world
        if self.trunk is not None:
            self.trunk.refill(self.store)
        generator = torch.Generator().manual_seed(train.seed * 1_000_003 + self.progress.round)
        self.round_steps = math.ceil(len(self.store) / train.batch_size) * self.passes
        batches = partial(self.store.batches, train.batch_size, generator, rank=world.rank, ranks=world.size)
        yield from batches(self.passes, skip=self.progress.position, by_length=train.group_by_length)

    def optimize(self, batch: E | None) -> Metrics:
        """Make one step on this process's part of a global batch (None: it has none), and return its metrics."""
        parts = [] if batch is None else list(self.microbatches(batch))
        try:
            metrics, self._stopping = self.optimisation.step(parts, self.loss, self.units, self.accept)
        except (NonFiniteError, SamplerError):  # on all processes; the weights are as before the step
            self._save_before_end()
            raise
        return metrics

    def _collect(self) -> None:
        """Make a new round's experience. If that fails, restore the state before the round and save the run."""
        progress = self.progress
        before = self.state.snapshot()
        self._pending = {}
        try:
            self.store.clear()
            self.rollouts.begin()
            self.model.eval()
            with self.run.backend.sampling():
                made = self.make_experience()
            self._pending = {**self.rollouts.metrics(), **made}
        except (Exception, Interrupted) as error:
            self.state.restore(before)
            if isinstance(error, NonFiniteError):  # the state before the round is the one that cannot be sampled from
                raise
            if self.world.size == 1 or isinstance(error, (Interrupted, RewardError, SamplerError)):  # on all processes
                self._save_before_end()
            raise
        if progress.in_round:  # resumed: offline experience is made again, and has been accounted for
            self.store.join(self.world.gather, self.world.size)
            self.state.restore(before)
            self._pending = {}
            return
        self.begin_round()
        self._call("on_experience", self._pending)

    def _end_step(self, metrics: Metrics) -> None:
        train, step, best = self.config.train, self.progress.step, self.progress.best
        self.run.ledger.write_step(self.run.tracker, self.store, given=self.offline)
        metrics = {**self._pending, **metrics}
        self._pending = {}
        self.stopped |= self._call("on_step", metrics)
        if step % train.eval_interval == 0 or self.finished:
            metrics |= self._evaluated()
        self._log({**metrics, **self.clock.lap()})
        self.divergence_watch.watch(metrics)
        stop = self._stopping or (self.run.stop_request.code if self.world.size == 1 else 0)
        at_once = self.finished or bool(stop)
        if at_once or step % train.checkpoint_interval == 0:
            like = None if self.callbacks else self.run.folder.new_best(best, self.progress)  # they may change weights
            (self.save if at_once else self._save_beside)(None, like)
        if stop:
            raise Interrupted(stop)

    def _evaluated(self) -> Metrics:
        """Evaluate with a random state of its own, and save the best checkpoint."""
        self.run.folder.saving.settle()
        self.model.eval()
        seed = self.config.train.seed + 7919 * self.progress.step + self.world.rank
        with isolated_rng(seed), self.clock("evaluate"), torch.no_grad(), self.run.backend.sampling():
            metrics = self.evaluate()
        if metrics:
            before = self.progress.best
            if note_best(self.config.train, self.progress, metrics) and self.progress.step:
                self._save_beside(self.run.folder.best, None, lambda: setattr(self.progress, "best", before))
            self._call("on_evaluate", metrics)
        return metrics

    def _log(self, metrics: Metrics) -> None:
        self.run.log(metrics)
        self.last_metrics |= metrics

    def _call(self, hook: str, *args: Any) -> bool:
        """Call a hook of every callback; return whether one of any process answered False."""
        return bool(self.callbacks) and any(self.world.gather([call(self.callbacks, hook, self, *args)]))

    # Files.

    def save(self, directory: str | Path | None = None, like: Path | None = None) -> None:
        """Write a checkpoint atomically, by default to `checkpoint_<step>` in the run folder.

        Args:
            directory: The folder of the checkpoint.
            like: A checkpoint in the run folder of the same weights, whose large files this one shares.

        Raises:
            CheckpointError: If it cannot be written.
            NonFiniteError: If a weight of the model is NaN or infinite. Nothing is written then.
        """
        found = self.world.gather([first_nonfinite(self.model, self.run.backend.own)])
        if name := next(filter(None, found), None):
            raise NonFiniteError(f"No checkpoint of step {self.progress.step} is written: {name} is not finite.")
        what = self.state, self._export_whole, self.progress.step
        self.run.folder.save(*what, directory, partial(self._call, "on_save"), like)

    def save_pretrained(self, directory: str | Path, *, merged: bool | None = None) -> None:
        """Export the trained model to a folder that plain transformers or diffusers load, without the trainer's state.

        Every process calls it; the main process writes.

        Args:
            directory: The folder.
            merged: Merge an adapter into the model's weights, or write the adapter alone; None: what `export` does.
        """
        with self.run.backend.whole():
            self.run.folder.export(partial(self.export, Path(directory), merged), Path(directory), self.progress.step)

    def _export_whole(self, directory: Path) -> None:
        with self.run.backend.whole():  # also for a `save_pretrained` of a plugin
            self.save_pretrained(directory)

    def _save_beside(self, place: Path | None, like: Path | None, undo: Callable[[], None] = lambda: None) -> None:
        """Save the run, beside training if `train.async_save` says so.

        Args:
            place: The folder of the checkpoint; None for `checkpoint_<step>` in the run folder.
            like: As for `save`.
            undo: Called if the disk refuses it and training continues.
        """
        with self.run.folder.saving.may_wait(undo):
            self.save(place, like)

    def _save_before_end(self) -> None:
        """Save the run before an error ends it. If that fails too, log it, so that the first error is shown."""
        if self.progress.step:
            try:
                self.save()
            except TrlxError as error:
                logger.error("%s", error)

    def load(self, directory: str | Path) -> None:
        """Restore a checkpoint, or the newest intact one of a run folder."""
        self.run.folder.load(directory, self.state)

    def _prepare(self) -> None:
        """Bring the model to the device, make the optimiser, and register what checkpoints hold."""
        rate = learning_rate_for(*weights_for_rate(self.model))  # before they are divided
        self.run.backend.prepare(self.model, getattr(self.model, "reference_modules", list)())
        self.state.register("model", self.run.backend.stateful(self.model), small=False)
        self.optimisation = Optimisation(self.run, self.model, self.scoring.tokenizer, self.statistics, rate)
        self.divergence_watch = DivergenceWatch(self.run, self.optimisation)
        self.state.register("progress", self.progress)
        self.state.register("rng", RngState(), local=True, renew=self.run.reseed)
        if not self.offline:
            self.state.register("store", self.store, small=False)
        self.run.seed()
