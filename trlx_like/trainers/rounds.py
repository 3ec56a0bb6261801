"""Loops that users write: one call is one round of training, on what the caller gives.

The run folder gets what `learn` writes: metrics, tables of samples, report, audit, evaluations and checkpoints.
Left out on purpose: the heartbeat, and stopping after the step at a signal, since the loop's own code runs in between.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from trlx_like.errors import ConfigError, TrlxError
from trlx_like.rewards.arguments import metadata_columns
from trlx_like.tracking import TRAINING
from trlx_like.trainers.base import Metrics
from trlx_like.trainers.text import E, TextTrainer

logger = logging.getLogger(__name__)


class RoundsByHand(TextTrainer[E]):
    """Make rounds that the caller begins, with the files, evaluations, callbacks and checkpoints of `learn`."""

    _opened: ExitStack | None = None  # closes the files
    _at_end: weakref.finalize[Any, Any]  # closes them when the process ends, if nothing else has

    def begin(self) -> None:
        """Open the run folder and the trackers, and resume as `train.resume_from_checkpoint` says.

        The first batch of `dataloader` and the first step do this too. Call it first in a loop that has another source
        of prompts and may be resumed, so that nothing is sampled before.
        """
        if self._opened is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(self.run.held())
            stack.enter_context(self.run.open_trackers())
            self._call("on_train_begin")
            if not self.progress.step:
                self._log(self._evaluated())
            self._opened = stack.pop_all()
            self._at_end = weakref.finalize(self, _close, self._opened)

    def close(self) -> None:
        """Save the run if its last step is not saved, write the report and close the files.

        The step that completes training does this too. A process that ends without it writes the report only.
        """
        if self._opened is None:
            return
        step = self.progress.step
        if step and step % self.config.train.checkpoint_interval and not self.finished:
            self.save()
        self.run.folder.saving.wait()
        self._call("on_train_end")
        self._at_end.detach()
        self._opened.close()
        self._opened = None

    def learn(self, **functions: Any) -> Metrics:
        self.close()
        return super().learn(**functions)

    def round_of(self, make: Callable[[], Metrics]) -> Metrics:
        """Train for one round.

        Args:
            make: Puts experience into the store, and returns the metrics of the round.

        Returns:
            The metrics of the round, and the metrics of its steps averaged over the steps.

        Raises:
            ConfigError: If training is complete (`train.total_steps` or `train.epochs` is reached), or the run was only
                resumed now.
        """
        if self.finished:
            done, rounds, train = self.progress.step, self.progress.round, self.config.train
            raise ConfigError(
                f"step: training is complete after {done} steps (train.total_steps: {train.total_steps}) "
                f"and {rounds} rounds (train.epochs: {train.epochs}); end the loop when trainer.finished."
            )
        before = self.progress.step
        self.begin()
        if self.progress.step != before:
            raise ConfigError(
                f"train.resume_from_checkpoint: the run was resumed at step {self.progress.step} only now, and what is "
                "given was made before; call trainer.begin() before the loop."
            )
        self.store.clear()
        self.model.eval()
        with self.run.backend.sampling():
            made = make()
        of_round = self._pending = {**self.rollouts.metrics(), **made}
        self.rollouts.begin()
        self.begin_round()
        self._call("on_experience", self._pending)
        steps = list(self._run_round())
        self.end_round()
        if self.finished:
            self.close()
        names = dict.fromkeys(name for of_step in steps for name in of_step)  # a step that was dropped lacks some
        columns = {name: [of_step[name] for of_step in steps if name in of_step] for name in names}
        return {**of_round, **{name: sum(column) / len(column) for name, column in columns.items()}}

    @property
    def dataloader(self) -> Iterator[dict[str, list[Any]]]:
        """Iterate over one epoch of the prompts, in batches of `method.num_rollouts` over all processes.

        Each batch has this process's "input_ids" (tensors [P]), "query" (text) and a list for each further key of the
        prompts. The position is in checkpoints.

        Raises:
            ConfigError: If no prompts were given.
        """
        if not hasattr(self, "prompts"):
            raise ConfigError("dataloader: there are no prompts; pass prompts=... to the trainer, or set data.prompts.")
        return self._batches()

    def _batches(self) -> Iterator[dict[str, list[Any]]]:
        self.begin()
        count = self.method.num_rollouts
        for _ in range(max(1, len(self.prompts.pipeline) // count)):
            if self.finished:
                return
            prompts = self.take_prompts(count)
            ids = [torch.tensor(row) for row in prompts.ids]
            yield {"input_ids": ids, "query": self.decode(ids), **metadata_columns(prompts.metadata)}

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Log further metrics, and a table of a batch with its rewards. Every process calls it.

        Args:
            stats: Metrics; those that `step` returned are logged already.
            batch: Columns of samples; token ids are not decoded.
            rewards: The reward of each sample.
            columns_to_log: The columns to show.

        Raises:
            ConfigError: If the batch lacks one of the columns, or no step was made yet.
        """
        if missing := [name for name in columns_to_log if name not in batch]:
            raise ConfigError(f"log_stats: the batch has no {missing[0]!r}; its columns are {', '.join(batch)}.")
        self._log({name: value for name, value in stats.items() if name not in self.last_metrics})
        columns = [*(batch[name] for name in columns_to_log), [float(reward) for reward in rewards]]
        names = [*columns_to_log, "reward"]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        self.run.log_table(TRAINING, rows[: self.config.train.log_samples], self.progress.step)


def _close(stack: ExitStack) -> None:
    """Close the files of a run that its loop has left open. Its folder may be gone."""
    try:
        stack.close()
    except TrlxError as error:
        logger.warning("%s", error)
