"""The terminal: a bar with the time left and the numbers that matter, and the samples of each evaluation.

Where output is not a terminal there are neither bars nor control characters: one plain line an evaluation, and one a
minute when nothing else is said.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trlx_like.tracking.base import RunInfo
from trlx_like.tracking.values import compact, plain, shorten

# What is shown of training, in this order: a label and the names it goes by, of which the first that exists is taken.
TRAINING = {
    "kl": ("policy/kl", "policy/approx_kl"),
    "loss": ("losses/total_loss", "losses/loss", "loss"),
    "lr": ("learning_rate",),
}
ROWS, CELL = 6, 160  # of a table: rows and characters a cell that are shown
QUIET_SECONDS = 60.0


class Headline:
    """The numbers that matter, as one line of text."""

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Remembers metrics. True if they are an evaluation's."""
        self._latest.update(metrics)
        return any(_evaluated(name) for name in metrics)

    def text(self, evaluation: int) -> str:
        """`reward 0.93  optimality 0.95  kl 0.01  loss 0.4  lr 1e-05`, of at most `evaluation` evaluated metrics."""
        shown = [(_label(name), self._latest[name]) for name in filter(_evaluated, self._latest)][:evaluation]
        if not shown and "rollout/score_mean" in self._latest:
            shown = [("score", self._latest["rollout/score_mean"])]
        for label, names in TRAINING.items():
            shown += [(label, self._latest[name]) for name in names if name in self._latest][:1]
        return "  ".join(f"{shorten(label, 40)} {compact(value)}" for label, value in shown)


def _evaluated(name: str) -> bool:
    return name.startswith(("reward/mean", "metrics/"))


def _label(name: str) -> str:
    return name.replace("reward/mean", "reward", 1).removeprefix("metrics/")


class ConsoleTracker:
    """Shows the run on standard output, in the way that fits where that goes."""

    def __init__(self, run: RunInfo) -> None:
        terminal = sys.stdout.isatty() and not Console().is_dumb_terminal
        self._view: Bar | Lines = Bar(run) if terminal else Lines(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._view.log(metrics, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self._view.log_table(name, columns, rows, step)

    def close(self) -> None:
        self._view.close()


class Lines:
    """For files and pipes."""

    def __init__(self, run: RunInfo) -> None:
        self._total = run.total_steps
        self._first = run.resume_step or 0
        self._start = self._said = time.monotonic()
        self._headline = Headline()
        self._unsaid: int | None = None  # the last step, if there is no line about it yet

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._unsaid = step
        if self._headline.update(metrics) or time.monotonic() - self._said >= QUIET_SECONDS:
            self._say(step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Tables are in samples.jsonl."""

    def close(self) -> None:
        if self._unsaid is not None:
            self._say(self._unsaid)

    def _say(self, step: int) -> None:
        self._said, self._unsaid = time.monotonic(), None
        seconds, done, remaining = self._said - self._start, step - self._first, self._total - step
        left = f", {_duration(seconds / done * remaining)} left" if done > 0 and remaining > 0 else ""
        clock = f"({_duration(seconds)}{left})"
        print(f"step {step}/{self._total}  {self._headline.text(evaluation=8)}  {clock}", flush=True)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Bar:
    """For terminals. Appears with the first metrics, so that a trainer that never trains shows none."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._console = Console()
        self._headline = Headline()
        # Rounds alternate between long generation and quick steps: an estimate over minutes stays calm.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
            refresh_per_second=2,
            redirect_stderr=sys.stderr.isatty(),
            speed_estimate_period=1800,
        )
        self._task = self._progress.add_task(
            "training", total=run.total_steps, completed=run.resume_step or 0, numbers=""
        )
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._begin()
        evaluation = self._headline.update(metrics)
        self._progress.update(self._task, completed=step, numbers=self._headline.text(evaluation=1))
        if evaluation:
            line = f"step {step}/{self._run.total_steps}  {self._headline.text(evaluation=8)}"
            self._console.print(Text(line, style="bold"))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        more = f", {ROWS} of {len(rows)} rows" if len(rows) > ROWS else ""
        self._console.print(Text(f"{self._cell(name)} at step {step}{more}", style="bold"))
        table = Table(show_lines=True)
        for column in columns:
            table.add_column(Text(self._cell(column)), overflow="fold")
        for row in rows[:ROWS]:
            table.add_row(*(Text(self._cell(value)) for value in row))
        self._console.print(table)

    def close(self) -> None:
        self._progress.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []

    def _begin(self) -> None:
        """Starts the bar, and sends what `logging` writes to the terminal through it: neither breaks the other."""
        if self._progress.live.is_started:
            return
        before = {sys.stdout: "stdout", sys.stderr: "stderr"}
        self._progress.start()
        loggers = [logging.root, *(log for log in logging.root.manager.loggerDict.values())]
        for handler in {handler for log in loggers for handler in getattr(log, "handlers", ())}:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                self._redirected.append((handler, handler.stream))
                handler.setStream(getattr(sys, before[handler.stream]))

    def _cell(self, value: Any) -> str:
        """A value as text that this terminal can show, whatever is in it."""
        text = compact(value) if isinstance(value, float) else str(plain(value))
        return shorten(text, CELL).encode(self._console.encoding, "replace").decode(self._console.encoding)
