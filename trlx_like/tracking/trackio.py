"""The Trackio tracker: a local dashboard (`trackio show`). The variable `TRACKIO_DIR` says where it keeps its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trlx_like.tracking.base import RunInfo, Tracker, optional_package, started
from trlx_like.tracking.pictures import Picture, table_grid
from trlx_like.tracking.values import plain


class TrackioTracker(Tracker):
    """Log to a Trackio run, which continues under the same name when the run is resumed."""

    def __init__(self, run: RunInfo) -> None:
        with optional_package("trackio"):
            import trackio
        self._trackio = trackio
        known = run.state.get("trackio")
        self._run = started(
            "trackio",
            trackio.init,
            run,
            project=run.project,
            name=known or run.name,
            group=run.group,
            config=plain(run.config),
            resume="allow" if known else "never",
            embed=False,
        )
        run.state["trackio"] = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        cells = [[self._cell(cell) for cell in row] for row in rows]
        logged: dict[str, Any] = {name: self._trackio.Table(columns=list(columns), data=cells)}
        if (pictures := table_grid(columns, rows)) is not None:
            logged[f"{name}/grid"] = self._trackio.Image(pictures)
        self._run.log(logged, step=step)

    def _cell(self, value: Any) -> Any:
        return self._trackio.Image(value.file) if isinstance(value, Picture) else plain(value)

    def close(self) -> None:
        self._run.finish()
