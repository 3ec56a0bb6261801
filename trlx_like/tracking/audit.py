"""The audit: looks for signals that a reward rises for an unwanted reason, and for causes why it does not rise.

It reads the metrics of every round, during the run (one warning for each signal) and afterwards (`trlx-like audit`, the
report). A signal is not a proof: it says where to look.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trlx_like.errors import DataError
from trlx_like.tracking.base import RunInfo, Tracker
from trlx_like.tracking.causes import CAUSES
from trlx_like.tracking.folder import read_config, read_metrics
from trlx_like.tracking.signals import SIGNALS, History, Reading, Row, advice

logger = logging.getLogger(__name__)

ROUNDS = 5
"""The number of rounds before anything is judged."""
JUDGED = {**CAUSES, **SIGNALS}
"""What is judged, by name, and how it is measured."""


@dataclass(frozen=True)
class Verdict:
    """Hold the verdict of one signal on a run."""

    name: str
    advice: str
    reading: Reading | None = None  # of the last rounds that have one; None: the run does not log the metrics it needs
    since: int | None = None  # the step at which the signal was first found

    @property
    def state(self) -> str:
        """Return "found at step <n>", "not measured" or "clean"."""
        if self.since is not None:
            return f"found at step {self.since}"
        return "not measured" if self.reading is None else "clean"

    @property
    def words(self) -> str:
        """Return a sentence with the numbers of the last reading."""
        return "" if self.reading is None else self.reading.words


class Audit:
    """Judge a run by all causes and signals, updated round by round.

    Args:
        config: The configuration of the run as nested mappings. Its `reward.weights` weigh the reward functions, its
            `method` says how the KL weight acts, its `optimizer.name` what a learning rate means, and advice names only
            options that are in it.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        config = config or {}
        names = ("reward", "method", "optimizer")
        reward, method, optimizer = (s if isinstance(s := config.get(name), Mapping) else {} for name in names)
        weights = reward.get("weights")
        known = [float(weight) for weight in weights] if isinstance(weights, list) else None
        self.history = History(known, method, str(optimizer.get("name", "adamw")))
        self.verdicts = {name: Verdict(name, advice(name, config)) for name in JUDGED}

    @property
    def measured(self) -> bool:
        """Return whether any signal could be measured."""
        return any(verdict.reading is not None for verdict in self.verdicts.values())

    @property
    def found(self) -> list[Verdict]:
        """Return the verdicts of the signals that were found at any time."""
        return [verdict for verdict in self.verdicts.values() if verdict.since is not None]

    def add(self, metrics: Row, step: int) -> list[Verdict]:
        """Take in the metrics of a step; return the signals that are found for the first time.

        Args:
            metrics: What was logged. A step without metrics of a rollout round belongs to the round before it.
            step: The step at which it was logged.
        """
        if not any(name.startswith("rollout/") for name in metrics):
            self.history.add_step(metrics)
            return []
        self.history.add(metrics)
        new = []
        for name, measure in JUDGED.items() if self.history.count >= ROUNDS else ():
            verdict, reading = self.verdicts[name], measure(self.history)
            if math.isnan(reading.value):  # the last rounds did not log it: keep the last reading
                continue
            first = reading.found and verdict.since is None
            self.verdicts[name] = replace(verdict, reading=reading, since=step if first else verdict.since)
            if first:
                new.append(self.verdicts[name])
        return new


def audit_run(run_dir: Path, last_step: int | None = None) -> Audit:
    """Audit a run folder for causes why it does not learn, and for signs of reward hacking.

    Args:
        run_dir: The folder, with metrics.jsonl and, if there is one, config.yml.
        last_step: Ignore what was logged after this step.

    Raises:
        DataError: The folder has no metrics.jsonl.
    """
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise DataError(f"{run_dir} is not a run folder: it has no metrics.jsonl.")
    audit = Audit(read_config(run_dir)[1])
    for row in read_metrics(file):
        if row is not None and (last_step is None or row[0] <= last_step):
            audit.add(row[1], row[0])
    return audit


def findings(run_dir: Path, last_step: int | None = None) -> dict[str, Any] | None:
    """Return the audit of a run folder in the form of the report's data; None for a run that cannot be judged.

    The arguments are those of `audit_run`.
    """
    audit = audit_run(run_dir, last_step) if (run_dir / "metrics.jsonl").is_file() else Audit()
    if not audit.measured:
        return None
    verdicts = [
        {"name": one.name, "state": one.state, "found": one in audit.found, "words": one.words, "advice": one.advice}
        for one in audit.verdicts.values()
    ]
    return {"rounds": audit.history.count, "found": len(audit.found), "verdicts": verdicts}


def show_audit(run_dir: Path) -> bool:
    """Print the audit of a run folder; return whether any signal is found.

    Raises:
        DataError: The folder has no metrics.jsonl, or its run cannot be judged.
    """
    from rich.console import Console
    from rich.table import Table

    audit = audit_run(run_dir)
    rounds = audit.history.count
    if rounds < ROUNDS:
        raise DataError(
            f"{run_dir} has {rounds} rounds of sampling; the audit needs {ROUNDS}. Offline trainers have none."
        )
    if not audit.measured:
        raise DataError(f"{run_dir} has rounds, but none of the metrics that the audit needs (docs/audit.md).")
    table = Table("signal", "verdict", show_lines=True)
    table.add_column("bound", max_width=20)
    table.add_column("what the last rounds show")
    for verdict in audit.verdicts.values():
        style = "bold red" if verdict in audit.found else "dim" if verdict.reading is None else ""
        bound = "" if verdict.reading is None else verdict.reading.bound
        table.add_row(verdict.name, verdict.state, bound, verdict.words, style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for verdict in audit.found:
        print(f"{verdict.name}: {verdict.advice}")
    names = ", ".join(verdict.name for verdict in audit.found)
    unknown = ", ".join(name for name in SIGNALS if audit.verdicts[name].reading is None)
    print(f"Found: {names}." if names else f"Nothing found in {rounds} rounds.")
    if unknown:
        print(f"Not measured, so that nothing is known of: {unknown}.")
    return bool(names)


class AuditTracker(Tracker):
    """Log one warning for each signal, in the round in which it is first found. A resumed run does not repeat them."""

    def __init__(self, run: RunInfo) -> None:
        resumed = run.resume_step is not None and (run.directory / "metrics.jsonl").is_file()
        self._audit = audit_run(run.directory, run.resume_step) if resumed else Audit(run.config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for verdict in self._audit.add(metrics, step):
            logger.warning("Audit, step %d, %s: %s. Try: %s", step, verdict.name, verdict.words, verdict.advice)
