"""The command `trlx-like sweep`, and the page that it writes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trlx_like.cluster import Overrides, Plugins, words_of
from trlx_like.imports import needed
from trlx_like.sweep.spec import SweepConfig, check_points, read_sweep, setting

if TYPE_CHECKING:
    from optuna import Study

FILES = ("journal.log", "journal.log.lock", "report.html", "report.html.tmp")
DRAWN = 8
"""The most trials whose curves are on the page: there are as many colors."""


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The YAML file of a sweep.")],
    base: Annotated[
        Path | None, typer.Option("--config", help="The YAML file of the runs, if SWEEP does not name it.")
    ] = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
) -> None:
    """Search for good values of options.

    Trains with many values of the options, each with several seeds. The same command goes on with a sweep that was
    stopped or killed. Exits with 1 if no trial was finished.
    """
    spec, notes = read_sweep(file, base)
    for note in notes:
        typer.echo(note, err=True)
    values = check_points(file, spec, overrides or (), plugins or ())
    with needed("a sweep needs Optuna", "sweep"):
        import optuna  # noqa: F401  # before the folder is made
    from trlx_like.checkpoint.claim import RunFiles
    from trlx_like.sweep.running import Runner
    from trlx_like.sweep.search import described, open_study, ranked

    folder = Path(spec.folder or "")
    seeds = spec.seeds if spec.seeds is not None else [values["train"]["seed"]]
    files = RunFiles(folder, "folder")
    files.open()
    try:
        files.claim(FILES)
        study = open_study(spec, folder, values)
        words = [*words_of(overrides, plugins), "--", str(spec.config)]

        def ended(number: int) -> None:
            typer.echo(_line(described(study.get_trials(deepcopy=False)[number], spec), spec))
            _write(study, spec, folder)

        Runner(study, spec, seeds, words, files, ended).run()
        best = ranked(study, spec)[0]
        page = _write(study, spec, folder)
    finally:
        files.close()
    if best["state"] != "finished":
        typer.echo(f"No trial was finished. {_line(best, spec)}", err=True)
        raise typer.Exit(1)
    options = " ".join(f"--set {shlex.quote(setting(name, value))}" for name, value in best["point"].items())
    typer.echo(f"Best: {_line(best, spec)}\ntrlx-like train {spec.config} {options}\nReport: {page}")


def _line(trial: dict[str, Any], spec: SweepConfig) -> str:
    """Describe a trial in a line."""
    point = ", ".join(f"{name}={value}" for name, value in trial["point"].items())
    words = f"{spec.metric} {trial['value']:.4g}" if trial["value"] is not None else trial["state"]
    if trial["state"] == "stopped early":
        words = f"stopped early at {words}"
    elif trial["error"]:
        words = trial["error"]
    elif trial["seeds"] > 1:
        words += f" ({trial['low']:.4g} to {trial['high']:.4g} over {trial['seeds']} seeds)"
    return f"trial {trial['number']}: {words}   {point}"


def _write(study: Study, spec: SweepConfig, folder: Path) -> Path | None:
    """Write the page of the trials so far, with the curves of the best; None if no run has logged anything."""
    from trlx_like.sweep.search import importance, ranked
    from trlx_like.tracking.compare import write_comparison

    trials = ranked(study, spec)
    drawn = [runs for one in trials if (runs := sorted((folder / f"{one['number']:03d}").glob("seed_*/metrics.jsonl")))]
    runs = [file.parent for files in drawn[:DRAWN] for file in files]
    if not runs:
        return None
    data = {
        "metric": spec.metric,
        "mode": spec.mode,
        "log": [name for name, space in spec.spaces.items() if not isinstance(space, list) and space.log],
        "options": list(spec.options),
        "trials": trials,
        "importance": importance(study, spec),
        "drawn": min(DRAWN, len(drawn)),
    }
    more = {"name": f"{folder.name}: {len(trials)} trials", "sweep": data, "command": "trlx-like sweep SWEEP"}
    return write_comparison(runs, folder / "report.html", "sweep", **more)
