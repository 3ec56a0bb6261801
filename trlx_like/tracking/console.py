"""The terminal: a bar with the time left and the numbers that matter, the samples of each evaluation, and now and then
those of a round.

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

from trlx_like.tracking.base import TRAINING, RunInfo
from trlx_like.tracking.values import compact, plain, shorten

# What is shown of training, in this order: a label and the names it goes by, of which the first that exists is taken.
NUMBERS = {
    "kl": ("policy/kl", "policy/approx_kl"),
    "loss": ("losses/total_loss", "losses/loss", "loss"),
    "lr": ("learning_rate",),
}
ROWS, CELL = 6, 160  # of a table: rows and characters a cell that are shown
SHORT, READABLE = 16, 24  # characters of a cell that is no text, and of the column of a text that can be read
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
        for label, names in NUMBERS.items():
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
        self._round_shown = -QUIET_SECONDS  # when the samples of a round were last shown

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._begin()
        evaluation = self._headline.update(metrics)
        self._progress.update(self._task, completed=step, numbers=self._headline.text(evaluation=1))
        if evaluation:
            line = f"step {step}/{self._run.total_steps}  {self._headline.text(evaluation=8)}"
            self._console.print(Text(line, style="bold"))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        if name == TRAINING:  # there is one in every round, which may be a step
            if time.monotonic() - self._round_shown < QUIET_SECONDS:
                return
            self._round_shown = time.monotonic()
        more = f", {ROWS} of {len(rows)} rows" if len(rows) > ROWS else ""
        self._console.print(Text(f"{self._cell(name)} at step {step}{more}", style="bold"))
        self._console.print(self._table(columns, rows[:ROWS]))

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
        """Texts beside what is short, which has columns of its own where they leave room for the texts, else one."""
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
        text = "" if value is None else compact(value) if isinstance(value, float) else str(plain(value))
        return shorten(text, CELL).encode(self._console.encoding, "replace").decode(self._console.encoding)
