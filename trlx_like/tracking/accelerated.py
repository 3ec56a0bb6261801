"""The trackers MLflow and SwanLab, which accelerate drives. Their environment variables have their documented effect.

Tables go to MLflow as JSON files of the run, and to SwanLab as texts; pictures stay in the run folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trlx_like.tracking.base import RunInfo, Tracker, optional_package, started
from trlx_like.tracking.values import plain


class MlflowTracker(Tracker):
    """Log to an MLflow run, which continues under the same id when the run is resumed."""

    def __init__(self, run: RunInfo) -> None:
        with optional_package("mlflow"):
            import mlflow
        from accelerate.tracking import MLflowTracker

        self._mlflow, known = mlflow, run.state.get("mlflow")
        own = {"experiment_name": run.project, "run_name": run.name, "run_id": known}
        self._tracker = _begun("mlflow", MLflowTracker, run, **own)
        run.state["mlflow"] = self._tracker.tracker.info.run_id
        if known is None:  # the parameters of a run cannot change
            sections = {name: values for name, values in plain(run.config).items() if isinstance(values, dict)}
            options = {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
            self._tracker.store_init_configuration(options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # MLflow refuses other characters, such as the @ of an evaluation set.
        self._tracker.log({re.sub(r"[^\w./ -]", "_", name): value for name, value in metrics.items()}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        table = {"columns": list(columns), "data": [[plain(cell) for cell in row] for row in rows]}
        self._mlflow.log_dict(table, f"{name}/{step:08d}.json")

    def close(self) -> None:
        self._mlflow.end_run({None: "FINISHED", True: "KILLED", False: "FAILED"}[stopped()])


class SwanlabTracker(Tracker):
    """Log to a SwanLab experiment, which continues under the same id when the run is resumed."""

    def __init__(self, run: RunInfo) -> None:
        with optional_package("swanlab"):
            import swanlab
        from accelerate.tracking import SwanLabTracker

        self._swanlab = swanlab
        own: dict[str, Any] = {"experiment_name": run.name, "logdir": str(run.directory / "swanlog")}
        if (known := run.state.get("swanlab")) is not None:
            own |= {"id": known, "resume": "allow"}
        self._tracker = _begun("swanlab", SwanLabTracker, run, run_name=run.project, **own)
        run.state["swanlab"] = self._tracker.tracker.id
        self._tracker.store_init_configuration(plain(run.config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [dict(zip(columns, map(plain, row), strict=True)) for row in rows]
        texts = [self._swanlab.Text(json.dumps(line, ensure_ascii=False)) for line in lines]
        self._tracker.log({name: texts}, step=step)

    def close(self) -> None:
        state = {None: "success", True: "aborted", False: "crashed"}[stopped()]
        self._tracker.run.finish(state, error=repr(sys.exc_info()[1]) if state == "crashed" else None)


def stopped() -> bool | None:
    """Return whether the run, which is closed now, was asked to stop; False after an error, None if it ended well."""
    kind = sys.exc_info()[0]
    return None if kind is None else issubclass(kind, SystemExit | KeyboardInterrupt)


def _begun(name: str, kind: Any, run: RunInfo, **own: Any) -> Any:
    """Make a tracker of accelerate and start it."""

    def start(**options: Any) -> Any:
        tracker = kind(**options)
        tracker.start()
        return tracker

    return started(name, start, run, **own)
