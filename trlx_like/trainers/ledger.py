"""The ledger of a run: which prompts each round used, and of a run on given data, which samples each step used.

Each process notes what it takes. The processes put their notes together once a round (once a step on given data), and
the main process writes them to `ledger.jsonl` with the first step that follows. Until then they are part of
`Progress`, and so of every checkpoint. `trlx_like.tracking.ledger` says how to read the file, and checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trlx_like.data import RolloutStore
from trlx_like.distributed import World
from trlx_like.tracking import Trackers

if TYPE_CHECKING:
    from trlx_like.trainers.progress import Progress

Use = tuple[int, int]
"""An epoch of the data and the number of a row in it, both from 0."""


class Ledger:
    """Record the rows of the data that were used.

    Args:
        world: The processes of the run.
        progress: The position of the run, which keeps notes that are not written yet.
    """

    def __init__(self, world: World, progress: Progress) -> None:
        self.world = world
        self.progress = progress
        self._own: list[Use] = []
        self._about: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a round: forget the notes of this process on a round that failed."""
        self._own = []

    def use(self, used: Sequence[Use], rows: int | None) -> None:
        """Note rows that this process takes for the round.

        Args:
            used: The rows, with their epochs.
            rows: The number of rows in an epoch; None for data without an end.
        """
        self._own += used
        self._about = {} if rows is None else {"of": rows}

    def close_round(self) -> None:
        """Put together the notes of all processes on the round that begins."""
        self._keep(self.world.gather([self._own]), {"round": self.progress.round, **self._about})
        self._own = []

    def write_step(self, trackers: Trackers | None, store: RolloutStore[Any], *, given: bool) -> None:
        """Write all pending notes with the step that was just made.

        Args:
            trackers: The trackers of the run.
            store: The store that the step's batch came from.
            given: Whether it holds given data, whose rows are recorded step by step.
        """
        if given:
            shares = [store.rows[rank :: self.world.size] for rank in range(self.world.size)]
            self._keep([[(store.epoch, row) for row in share] for share in shares], {"of": len(store)})
        self.write(trackers, self.progress.step)
        self.progress.used = []

    def write(self, trackers: Trackers | None, step: int) -> None:
        """Write all pending notes under a step."""
        if trackers is not None:
            trackers.log_use(self.progress.used, step)

    def _keep(self, shares: Sequence[Sequence[Use]], about: dict[str, int]) -> None:
        """Note the rows that each process used, with a record for each epoch."""
        for epoch in sorted({epoch for share in shares for epoch, _ in share}):
            rows = [[row for of, row in share if of == epoch] for share in shares]
            self.progress.used.append({**about, "epoch": epoch, "rows": rows})
