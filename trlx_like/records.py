"""The commands that read the records of runs: `report`, `compare`, `audit` and `ledger`. They import no torch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trlx_like.errors import DataError

if TYPE_CHECKING:
    from trlx_like.checkpoint.claim import RunFiles

FINDINGS = 4
"""Exit code of `audit` if it finds something in a run, and of `ledger` if a row was not used once."""

UNFINISHED = "report.html.new"
"""The page while it is written here; a run that goes on may write its own at the same time."""
POLL = 1.0
"""Seconds between two looks at a run."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def report(
    run: RunArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it whenever there are new metrics, until the run ends.")
    ] = False,
) -> None:
    """Write the page report.html of a run again."""
    from trlx_like.checkpoint.claim import RunFiles
    from trlx_like.tracking.report import write_report

    files = RunFiles(run)
    if run.is_dir() and not (run / "metrics.jsonl").is_file() and not (watch and files.in_use()):
        raise DataError(f"{run} is not a run folder: it has no metrics.jsonl.")
    with files.claimed(("report.html", UNFINISHED)) if run.is_dir() else nullcontext():
        typer.echo(write_report(run, UNFINISHED))
    if watch:
        _follow(run, files)


def _follow(run: Path, files: RunFiles) -> None:
    """Write the report whenever metrics.jsonl has changed, and a last time after the run has ended."""
    from trlx_like.tracking.report import write_report

    metrics, seen, running = run / "metrics.jsonl", 0, files.in_use()
    while running:
        time.sleep(POLL)
        running = files.in_use()
        size, began = metrics.stat().st_size if metrics.is_file() else 0, time.monotonic()
        if size != seen or not running:
            write_report(run, UNFINISHED)
            time.sleep(running * 9 * (time.monotonic() - began))  # a tenth of the time is enough for a long run
        seen = size


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    to: Annotated[Path, typer.Option("--to", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write one page that compares several runs.

    It shows their curves, differing options and samples. Runs that differ only in their seed are drawn as their median,
    in a band from the lowest to the highest.
    """
    from trlx_like.tracking.compare import write_comparison

    typer.echo(write_comparison(runs, to))


def audit(run: RunArgument) -> None:
    """Find signs of reward hacking, and causes of failed learning.

    Exits with 0 if nothing is found, and with 4 otherwise.
    """
    from trlx_like.tracking.audit import show_audit

    raise typer.Exit(FINDINGS if show_audit(run) else 0)


def ledger(run: RunArgument) -> None:
    """Check that a run used each row of its data once per epoch.

    Exits with 0 if so. Otherwise prints the first wrong line of ledger.jsonl, and exits with 4.
    """
    from trlx_like.tracking.ledger import check_ledger

    sentence, right = check_ledger(run)
    typer.echo(sentence)
    raise typer.Exit(0 if right else FINDINGS)
