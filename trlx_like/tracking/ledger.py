"""Checks with ledger.jsonl that a run used each row of its data exactly once in each epoch.

A line is `{"step": 7, "round": 2, "of": 5, "epoch": 0, "rows": [[3, 0], [4]]}`: the round whose first step is step 7
used row 3 and 0 of 5 prompts on process 0, and row 4 on process 1, in the first epoch. A run on given data has a line
for each step, without a round. Data without an end (a function that makes prompts) has no "of"; its rows are calls,
counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trlx_like.errors import DataError
from trlx_like.tracking.folder import read_row

FILE = "ledger.jsonl"


class _Wrong(Exception):
    """Report a mistake in a line."""


class Ledger:
    """Count the uses of rows, line by line."""

    def __init__(self) -> None:
        self.used = 0
        self.round = self.step = 0
        self._first: dict[tuple[int, int], int] = {}  # by epoch and row: the step that used it
        self._epoch_of: dict[int, int] = {}  # by process: the epoch that it is in
        self._complete = 0  # epochs that are over on all processes

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line; raise `_Wrong` if a row is used too often, or an epoch ends without one of its rows."""
        try:
            step, epoch, shares = line["step"], line["epoch"], [list(map(int, rows)) for rows in line["rows"]]
            round_, size = line.get("round"), line.get("of")
            if any(type(value) is not int for value in (step, epoch)):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise _Wrong("it is no record of used rows") from None
        if step < self.step:
            raise _Wrong(f"step {step} comes after step {self.step}")
        if round_ is not None and round_ < self.round:
            raise _Wrong(f"round {round_} comes after round {self.round}")
        self.step, self.round = step, self.round if round_ is None else round_
        self._enter(epoch, shares, size, together=round_ is not None)
        for row in (row for rows in shares for row in rows):
            self._use(epoch, row, size)
        if size is None and max(row for _, row in self._first) >= len(self._first):
            missing = next(row for row in range(len(self._first)) if (0, row) not in self._first)
            raise _Wrong(f"call {missing} of the function was not used")

    def _enter(self, epoch: int, shares: list[list[int]], size: int | None, *, together: bool) -> None:
        """Note the epoch that each process is in. An epoch that no process is in any more must be complete."""
        for process, rows in enumerate(shares):
            if rows or (together and process in self._epoch_of):
                if epoch < self._epoch_of.get(process, 0):
                    raise _Wrong(f"process {process} goes back to epoch {epoch}")
                self._epoch_of[process] = epoch
        while size is not None and self._complete < min(self._epoch_of.values(), default=0):
            for row in range(size):
                if self._first.pop((self._complete, row), None) is None:
                    raise _Wrong(f"epoch {self._complete} is over, and row {row} was not used in it")
            self._complete += 1

    def _use(self, epoch: int, row: int, size: int | None) -> None:
        if epoch < self._complete:
            raise _Wrong(f"row {row} is used in epoch {epoch}, which was over")
        if size is not None and not 0 <= row < size:
            raise _Wrong(f"row {row} is used, and the data has {size}")
        if (epoch, row) in self._first:
            raise _Wrong(f"row {row} is used twice in epoch {epoch}; before, with step {self._first[epoch, row]}")
        self._first[epoch, row] = self.step
        self.used += 1


def check_ledger(run_dir: Path) -> tuple[str, bool]:
    """Check the ledger of a run.

    Args:
        run_dir: The run folder.

    Returns:
        A sentence, and whether each row was used once and only once in each epoch. The sentence names the first line
        that is wrong.

    Raises:
        DataError: The folder has no ledger.jsonl, or an empty one.
    """
    file = run_dir / FILE
    if not file.is_file():
        raise DataError(f"{run_dir} has no {FILE}: it is no run folder, or of a release that wrote none.")
    ledger, number = Ledger(), 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            row = read_row(line)
            if row is None and not line.endswith(b"\n"):
                break  # a killed run; a resume drops the line
            try:
                if row is None:
                    raise _Wrong("it is damaged")
                ledger.add(row)
            except _Wrong as wrong:
                where = "" if row is None else f" (step {row['step']})"
                return f"{file}, line {number}{where}: {wrong}.", False
    if not number:
        raise DataError(f"{file} is empty: the run used no data yet.")
    rounds = f" in {ledger.round} rounds" if ledger.round else ""
    return f"Each row was used once and only once: {ledger.used} uses{rounds}, until step {ledger.step}.", True
