"""The commands that read the records of runs: `report`, `compare`, `audit` and `ledger`. They import no torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from trlx_like.errors import DataError

FINDINGS = 4
"""Exit code of `audit` if a run shows signs of reward hacking, and of `ledger` if a row was not used once."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def report(run: RunArgument) -> None:
    """Write the page report.html of a run again."""
    from trlx_like.checkpoint.claim import RunFiles
    from trlx_like.tracking import write_report

    if run.is_dir() and not (run / "metrics.jsonl").is_file():
        raise DataError(f"{run} is not a run folder: it has no metrics.jsonl.")
    with RunFiles(run).claimed(("report.html", "report.html.tmp")) if run.is_dir() else nullcontext():
        typer.echo(write_report(run))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    to: Annotated[Path, typer.Option("--to", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write one page that compares runs: their curves, options and samples.

    Runs that differ only in their seed are drawn as their median, in a band from the lowest to the highest.
    """
    from trlx_like.tracking.compare import write_comparison

    typer.echo(write_comparison(runs, to))


def audit(run: RunArgument) -> None:
    """Look for signs of reward hacking in a run.

    Exits with 0 if there are none, and with 4 if there are some.
    """
    from trlx_like.tracking import show_audit

    raise typer.Exit(FINDINGS if show_audit(run) else 0)


def ledger(run: RunArgument) -> None:
    """Check that a run used each row of its data exactly once in each epoch.

    Exits with 0 if so. Otherwise prints the first wrong line of ledger.jsonl, and exits with 4.
    """
    from trlx_like.tracking import check_ledger

    sentence, right = check_ledger(run)
    typer.echo(sentence)
    raise typer.Exit(0 if right else FINDINGS)
