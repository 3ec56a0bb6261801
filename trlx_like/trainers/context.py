"""The run that all parts of a trainer share: configuration, processes, clock, progress, folder, trackers.

A `Run` is made once, before the model. It knows no trainer, so a part that is constructed with it can be read, tested
and replaced on its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from trlx_like.checkpoint import TrainState, isolated_rng, seed_everything
from trlx_like.config import TRLConfig
from trlx_like.distributed import Backend, Heartbeat, World, make_accelerator, make_backend
from trlx_like.functional.counter import stream
from trlx_like.tracking import IMAGE, Trackers
from trlx_like.trainers.clock import Clock
from trlx_like.trainers.interrupt import Interrupted, StopRequest
from trlx_like.trainers.ledger import Ledger
from trlx_like.trainers.progress import Progress
from trlx_like.trainers.run import RunFolder

ROLLOUTS, EVALUATION, DENOISING_ORDER, PROMPT_FUNCTION, PROCESS, EMBEDDINGS = range(6)
"""What random numbers are drawn for, each from streams of its own."""

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
Row = dict[str, Any]
"""One sample as column name -> value, for a table or for a call of a reward function."""

LAST_COLUMNS = ("length", "finish_reason", IMAGE)
"""Columns that tables of samples show last."""


class Run:
    """Hold what all parts of one training run share.

    Args:
        config: The complete configuration.
        name: Name of the trainer class, for log lines and checkpoints.
        given: The data and functions of the run, by the names of `train`'s arguments.

    Raises:
        ConfigError: If `backend.mixed_precision` is not available, or the launcher asks for what the configuration does
            not say.
    """

    def __init__(self, config: TRLConfig, name: str, given: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.accelerator = make_accelerator(config)
        self.device: torch.device = self.accelerator.device
        self.world = World(self.accelerator)
        self.backend: Backend = make_backend(self.world, config)
        self.local_batch_size = math.ceil(config.train.batch_size / self.world.size)  # of the process with most samples
        seed_everything(config.train.seed)  # random weights are the same on every process
        self.clock = Clock()
        self.progress = Progress()
        self.ledger = Ledger(self.world, self.progress)
        self.state = TrainState(meta={"trainer": name})
        self.folder = RunFolder(config, self.world, given)
        self.folder.announce(name, self.device)
        self.tracker: Trackers | None = None  # open while the trainer learns
        self.stop_request = StopRequest()
        self.heartbeat = Heartbeat(self.world, config.backend.timeout, self._about)

    def _about(self) -> dict[str, Any]:
        """Say what this process is doing, for the processes that watch it."""
        saved = self.folder.saving.saved
        checkpoint = None if saved is None else str(saved)
        phase, progress = self.clock.phase, self.clock.changes
        return {"phase": phase, "step": self.progress.step, "checkpoint": checkpoint, "progress": progress}

    @property
    def directory(self) -> Path:
        """The run folder, `train.checkpoint_dir`."""
        return self.folder.directory

    @property
    def microbatch_size(self) -> int:
        """Samples in one forward pass of this process: `train.minibatch_size`, or the whole local batch."""
        return self.config.train.minibatch_size or self.local_batch_size

    def stream(self, purpose: int, *numbers: int) -> int:
        """Return the stream of random numbers of a purpose, which `functional.counter` draws from.

        Args:
            purpose: One of the constants of this module.
            numbers: Which of the draws for this purpose it is, such as the number of the round.
        """
        return stream(self.config.train.seed, purpose, *numbers)

    def seed(self) -> None:
        """Restart this process's random number generators from `train.seed` and its rank."""
        seed_everything(self.config.train.seed + self.world.rank)

    def reseed(self) -> None:
        """Restart this process's generators from seed, step and rank, if the run had another number of processes.

        Rollouts, evaluations and the order of the data do not draw from these generators, but dropout does.
        """
        seed_everything(self.stream(PROCESS, self.progress.step, self.world.rank) % 2**63)
        if self.world.main:
            logger.info("The checkpoint is of another number of processes; dropout, if any, draws other numbers.")

    @contextmanager
    def forward(self, phase: str) -> Iterator[None]:
        """Run a `with` block under autocast, and add its time to a phase."""
        with self.clock(phase), self.accelerator.autocast():
            yield

    def check_stop(self) -> None:
        """Raise Interrupted if any process was asked to stop by a signal. Every process must call it."""
        if code := int(self.world.max(self.stop_request.code)):
            raise Interrupted(code)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run folder for this run in a `with` block, after resuming it as the configuration says."""
        with self.folder.held():
            if self.config.train.resume_from_checkpoint is not None:
                self.folder.load(self.config.train.resume_from_checkpoint, self.state)
            self.folder.begin(self.progress.step)
            yield

    @contextmanager
    def open_trackers(self) -> Iterator[None]:
        """Keep the trackers open in a `with` block, and leave the random state as it was before they opened.

        Some tracker packages draw random numbers when they are imported.
        """
        with isolated_rng(self.config.train.seed):
            self.tracker = self.folder.open_trackers(self.progress)
        with closing(self.tracker):
            yield
            # Rounds after the last step. A longer run drops these lines, and has them in its checkpoint.
            self.ledger.write(self.tracker, self.progress.step + 1)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to the trackers, under the current step. Does nothing while no tracker is open."""
        if metrics and self.tracker is not None:
            self.tracker.log(metrics, self.progress.step)

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Send samples to the trackers as a table.

        Args:
            name: Name of the table.
            rows: The samples; a column that a row lacks is left empty.
            step: The step that the table is logged under.
        """
        if self.tracker is None or not rows:
            return
        names = dict.fromkeys(name for row in rows for name in row)
        columns = sorted(names, key=lambda column: column in LAST_COLUMNS)
        self.tracker.log_table(name, columns, [[row.get(column) for column in columns] for row in rows], step)
