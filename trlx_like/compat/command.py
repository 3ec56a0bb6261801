"""The command `migrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trlx_like.errors import ConfigError


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A YAML file of trlX, of accelerate or of a sweep; or a checkpoint's folder."
        ),
    ],
    to: Annotated[Path | None, typer.Option("--to", help="The new file or folder; a checkpoint needs it.")] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--num-processes", min=1, help="How many processes trlX ran with: its batches are of each, ours of all."
        ),
    ] = None,
) -> None:
    """Turn a file of trlX into one for trlx-like.

    Prints a line for each thing that was changed, lost or means something else, and the new file if there is no --to.
    Exits with 2 if something is left to do by hand.
    """
    if file.suffix in (".yml", ".yaml"):
        from trlx_like.compat.migrate import migrate as translated

        if to is not None and to.exists():
            raise ConfigError(f"--to {to}: there is something already; give a new file.")
        text, notes = translated(file, processes)
        if to is not None:
            to.write_text(text, encoding="utf-8")
        else:
            typer.echo(text, nl=False)
    else:
        if processes is not None:
            raise ConfigError(f"--num-processes ({processes}) is for the configuration of a run, unlike {file}.")
        if to is None:
            raise ConfigError("--to is missing: the folder that the model is written to.")
        from trlx_like.compat.checkpoints import migrate_checkpoint

        notes = migrate_checkpoint(file, to)
    typer.echo("\n".join(notes), err=to is None)
    if any(note.startswith("to do: ") for note in notes):
        raise typer.Exit(ConfigError.exit_code)
