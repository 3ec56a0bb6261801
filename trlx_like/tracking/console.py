"""Shows a run on the terminal: a progress bar with the most important numbers, and tables of samples.

Where the output is not a terminal there are no bars and no control characters: one plain line for each evaluation, and
one per minute between evaluations. Samples are not shown there.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trlx_like.tracking.base import TRAINING, RunInfo, Tracker
from trlx_like.tracking.values import compact, plain, shorten

# The metrics of training that are shown, in this order: a label and the metrics it may show, the first of them that is
# logged. `policy/approx_kl` is not one of them: it is the divergence from the behaviour policy, not from the reference.
NUMBERS = {
    "reward": ("rollout/score_mean",),
    "accuracy": ("rewards/accuracies",),
    "margin": ("rewards/margins",),
    "kl": ("policy/kl", "losses/kl"),
    "loss": ("losses/total_loss", "losses/loss", "loss"),
    "perplexity": ("perplexity",),
    "lr": ("learning_rate",),
}
PAIRS = ("accuracy", "margin")  # left out if rewards are shown
# The metrics of an evaluation start with one of these names; the label that takes its place.
EVALUATED = {
    "reward/mean": "reward",
    "metrics/": "",
    "eval/rewards/accuracies": "accuracy",
    "eval/rewards/margins": "margin",
}
ROWS, CELL = 6, 160  # limits of a shown table: rows, and characters in a cell
SHORT, READABLE = 16, 24  # characters of a cell that is not text, and of the narrowest readable column of text
QUIET_SECONDS = 60.0


class Headline:
    """Keep the latest values of the most important metrics, as one line of text."""

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self._evaluated_at = -1

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Remember metrics of a step; return whether an evaluation is among them."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith(tuple(EVALUATED))}
        if evaluation and step != self._evaluated_at:
            self._evaluation, self._evaluated_at = {}, step
        self._evaluation |= evaluation
        self._latest |= metrics
        return bool(evaluation)

    def text(self, evaluated: int) -> str:
        """Return e.g. `reward 1.32  kl 0.01  loss 0.4  lr 1e-05  eval 0.872, optimality 0.95 @20`.

        Args:
            evaluated: Show at most this many metrics of the last evaluation.
        """
        shown = []
        for label, names in NUMBERS.items():
            value = next((self._latest[name] for name in names if name in self._latest), None)
            if value is not None and not (label in PAIRS and "rollout/score_mean" in self._latest):
                shown.append(f"{label} {compact(value)}")
        last = [
            f"{_label(name)}{'none' if math.isnan(value) else compact(value)}"
            for name, value in self._evaluation.items()
        ][:evaluated]
        return "  ".join(shown + [f"eval {', '.join(last)} @{self._evaluated_at}"] * bool(last))


def _label(name: str) -> str:
    """Return what stands before the value of an evaluated metric: nothing for the mean reward."""
    start = next(start for start in EVALUATED if name.startswith(start))
    return "" if name == "reward/mean" else shorten(name.replace(start, EVALUATED[start], 1), 40) + " "


def make_console(run: RunInfo) -> Tracker:
    """Return the tracker that shows the run on standard output: a `Bar` on a terminal, otherwise `Lines`."""
    return Bar(run) if sys.stdout.isatty() and not Console().is_dumb_terminal else Lines(run)


class Lines(Tracker):
    """Show the run as plain lines, for files and pipes."""

    def __init__(self, run: RunInfo) -> None:
        self._total = run.total_steps
        self._first = run.resume_step or 0
        self._start = self._last_line = time.monotonic()
        self._headline = Headline()
        self._unshown: int | None = None  # the last step, if no line was printed for it

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._unshown = step
        if self._headline.update(metrics, step) or time.monotonic() - self._last_line >= QUIET_SECONDS:
            self._print(step)

    def close(self) -> None:
        if self._unshown is not None:
            self._print(self._unshown)

    def _print(self, step: int) -> None:
        self._last_line, self._unshown = time.monotonic(), None
        seconds, done, remaining = self._last_line - self._start, step - self._first, self._total - step
        left = f", {_duration(seconds / done * remaining)} left" if done > 0 and remaining > 0 else ""
        clock = f"({_duration(seconds)}{left})"
        print(f"step {step}/{self._total}  {self._headline.text(evaluated=8)}  {clock}", flush=True)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Bar(Tracker):
    """Show the run on a terminal. The bar appears with the first metrics: a trainer that never trains shows none."""

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
        self._round_shown = -QUIET_SECONDS  # the time at which samples of training were last shown

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._begin()
        evaluation = self._headline.update(metrics, step)
        self._progress.update(self._task, completed=step, numbers=self._headline.text(evaluated=1))
        if evaluation:
            line = f"step {step}/{self._run.total_steps}  {self._headline.text(evaluated=8)}"
            self._console.print(Text(line, style="bold"))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if name == TRAINING:  # one comes with every round, which may be a single step
            if time.monotonic() - self._round_shown < QUIET_SECONDS:
                return
            self._round_shown = time.monotonic()
        more = f", {ROWS} of {len(rows)} rows" if len(rows) > ROWS else ""
        self._console.print(Text(f"{self._cell(name)} at step {step}{more}", style="bold"))
        self._console.print(self._table(columns, rows[:ROWS]))

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
        """Return a table whose short cells share one column if columns of their own would make texts too narrow."""
        cells = [[self._cell(value) for value in row] for row in rows]
        titles = [[self._cell(part) for part in column.replace("_", " ").split("/")] for column in columns]
        texts = [place for place in range(len(columns)) if max(len(row[place]) for row in cells) > SHORT]
        short = [place for place in range(len(columns)) if place not in texts]
        widths = [max(map(len, [*titles[place], *(row[place] for row in cells)])) + 3 for place in short]
        narrow = self._console.width - sum(widths) < READABLE * len(texts)
        table = Table()
        for place in texts if narrow else range(len(columns)):
            right = all(isinstance(row[place], int | float | None) for row in rows)
            table.add_column("\n".join(titles[place]), justify="right" if right else "left", overflow="fold")
        if narrow:
            table.add_column("", no_wrap=True)
        groups = [row[columns.index("group")] if "group" in columns else number for number, row in enumerate(rows)]
        for number, row in enumerate(cells):
            if number and groups[number] == groups[number - 1]:
                row = ["" if columns[place] in ("group", "prompt") else cell for place, cell in enumerate(row)]
            last = number + 1 == len(rows) or groups[number] != groups[number + 1]
            shown = [row[place] for place in (texts if narrow else range(len(columns)))]
            notes = [f"{' '.join(titles[place])} {row[place]}" for place in short if row[place]] if narrow else []
            table.add_row(*map(Text, [*shown, *(["\n".join(notes)] if narrow else [])]), end_section=last or narrow)
        return table

    def close(self) -> None:
        self._progress.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []

    def _begin(self) -> None:
        """Start the bar and send log lines through it, so that neither breaks the other."""
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
        """Return a value as text that this terminal can show."""
        text = "" if value is None else compact(value) if isinstance(value, float) else str(plain(value))
        return shorten(text, CELL).encode(self._console.encoding, "replace").decode(self._console.encoding)
