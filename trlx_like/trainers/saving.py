"""What becomes of the checkpoints of a run: those that are written at once, and the one that a thread is writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trlx_like.checkpoint.beside import Beside
from trlx_like.distributed import World
from trlx_like.errors import CheckpointError, DiskError

if TYPE_CHECKING:
    from trlx_like.config import TrainConfig

logger = logging.getLogger(__name__)

Done = Callable[[Path], Any]
"""Called with the folder of a checkpoint that is complete."""


class Saving:
    """Know whether checkpoints are written beside training, and what becomes of them. Every process calls all methods.

    Args:
        train: The options of section `train`.
        world: The processes of the run.

    Attributes:
        saved: The last checkpoint that is complete.
        beside: Writes beside training; None where a checkpoint is to be written at once.
    """

    def __init__(self, train: TrainConfig, world: World) -> None:
        self.train, self.world = train, world
        self.saved: Path | None = None
        self.beside: Beside | None = None
        self._undo: Callable[[], None] = lambda: None
        self._failure: Exception | None = None  # of a checkpoint, which ends the run
        self._pending: tuple[Beside, Path, Done, Callable[[], None]] | None = None

    @contextmanager
    def may_wait(self, undo: Callable[[], None]) -> Iterator[None]:
        """Let the checkpoint of a `with` block be written beside training, if `train.async_save` says so.

        If the disk refuses it, in the block or later, raise or warn, as `train.on_checkpoint_error` says.

        Args:
            undo: Called if the disk refuses it.
        """
        self.wait()
        self.beside = Beside(self.world.rank, self.world.size) if self.train.async_save else None
        self._undo = undo
        try:
            yield
        except (CheckpointError, DiskError) as error:
            self._refused(error, undo)
        finally:
            self.beside = None
        self.check()

    def check(self) -> None:
        """Raise the error of a checkpoint that was refused, if `train.on_checkpoint_error` says so."""
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def wait(self) -> None:
        """Wait until the checkpoint that is written beside training is complete, and raise the error if it failed."""
        self.settle()
        self.check()

    def settle(self) -> None:
        """Wait until the checkpoint that is written beside training is complete; if it failed, the next `wait` raises.

        So another checkpoint can be written before the run ends.
        """
        if self._pending is not None:
            (beside, place, done, undo), self._pending = self._pending, None
            try:
                self.world.all_or_none(beside.wait, place)
            except (CheckpointError, DiskError) as error:
                self._refused(error, undo)
                if self._failure is not None:
                    logger.warning("%s The run ends at its next checkpoint.", error)
            else:
                self.note(place, done)

    def end(self) -> None:
        """Wait for this process's part of a checkpoint, after an error that the other processes may not have met."""
        if self._pending is not None:
            (beside, *_), self._pending = self._pending, None
            try:
                beside.wait()
            except CheckpointError as error:
                logger.error("%s", error)

    def note(self, place: Path, done: Done, beside: Beside | None = None) -> None:
        """Note that a checkpoint is written, or that it is being written.

        Args:
            place: The folder of the checkpoint.
            done: Called once it is complete: now, or in `wait`.
            beside: Writes it; None if it is complete.
        """
        if beside is not None:
            self._pending = (beside, place, done, self._undo)
            return
        self.saved = place
        if self.world.main:
            logger.info("Saved %s.", place)
        done(place)

    def _refused(self, error: Exception, undo: Callable[[], None]) -> None:
        undo()
        if self.train.on_checkpoint_error == "stop":
            self._failure = error
        else:
            logger.warning("%s Training continues; the next checkpoint is tried in its turn.", error)
