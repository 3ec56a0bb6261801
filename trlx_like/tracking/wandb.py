"""The Weights & Biases tracker. `WANDB_MODE=offline` and the other variables of wandb have their documented effect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError
from trlx_like.tracking.base import RunInfo, Tracker, optional_package, started
from trlx_like.tracking.pictures import Picture, table_grid
from trlx_like.tracking.values import plain


class WandbTracker(Tracker):
    """Log to a wandb run, which continues under the same id when the run is resumed.

    The x axis is a metric `step`, because wandb's own counter cannot go back as a resumed run must.
    """

    def __init__(self, run: RunInfo) -> None:
        with optional_package("wandb"):
            import wandb
        self._wandb = wandb
        directory = Path(run.logging_dir or run.directory)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = started(
                "wandb",
                wandb.init,
                run,
                project=run.project,
                name=run.name,
                entity=run.entity,
                group=run.group,
                tags=list(run.tags) or None,
                dir=str(directory),
                config=plain(run.config),
                id=run.state.get("wandb"),
                resume="allow",
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f'train.tracker ("wandb") cannot start: {error} Run `wandb login`, or set WANDB_MODE=offline.'
            ) from error
        run.state["wandb"] = self._run.id
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        cells = [[self._cell(cell) for cell in row] for row in rows]
        table = self._wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)
        for place, column in enumerate(columns):
            if any(isinstance(row[place], Picture) for row in rows):
                table.cast(column, self._wandb.Image, optional=True)  # else wandb logs the text "Image"
        pictures = table_grid(columns, rows)
        more = {} if pictures is None else {f"{name}/grid": self._wandb.Image(pictures)}
        self._run.log({name: table, **more, "step": step})

    def _cell(self, value: Any) -> Any:
        return self._wandb.Image(str(value.file)) if isinstance(value, Picture) else plain(value)

    def close(self) -> None:
        # A run that is closed while an error is raised is shown as failed.
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
