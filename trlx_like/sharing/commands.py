"""The commands `trlx-like export` and `trlx-like push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder (its best checkpoint) or a checkpoint.")]
Merge = Annotated[bool, typer.Option("--merge", help="Merge an adapter into its model.")]
Dtype = Annotated[str | None, typer.Option(help="Number format of the weights: float32, bfloat16 or float16.")]


def export(
    run: Model,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder to write.")],
    merge: Merge = False,
    dtype: Dtype = None,
) -> None:
    """Export the model of a run to a folder, with a model card."""
    from trlx_like.sharing.export import export_run

    checkpoint, carded = export_run(run, to, merge=merge, dtype=dtype)
    typer.echo(f"Exported {checkpoint} to {to}{'' if carded else ', where your README.md is kept'}.")


def push(
    run: Model,
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Model repository of the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the files that would be uploaded.")] = False,
    merge: Merge = False,
    dtype: Dtype = None,
) -> None:
    """Upload the model of a run to the Hugging Face Hub."""
    from trlx_like.sharing.hub import push

    typer.echo("\n".join(push(run, repo, private=private or None, dry_run=dry_run, merge=merge, dtype=dtype)))
