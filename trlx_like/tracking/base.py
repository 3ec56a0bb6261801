"""The protocol of a tracker, the registry of trackers, and `Trackers`, which sends the metrics of a run to all of them.

A tracker is constructed with a `RunInfo`. `train.tracker` chooses trackers by the names that they are registered under.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trlx_like.errors import ConfigError
from trlx_like.imports import needed
from trlx_like.redact import redacted
from trlx_like.registry import Registry
from trlx_like.tracking.values import number

EVALUATION, TRAINING = "samples", "training"
"""The names of the tables with the samples of an evaluation and of a rollout round."""
IMAGE = "image"
"""The name of the column of pictures in these tables."""
T = TypeVar("T")


class Tracker(Protocol):
    """Receive the metrics and tables of a run. Only the main process has trackers.

    A subclass implements the methods that it needs; the others do nothing.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step.

        Args:
            metrics: Values by name. One step may be logged in several calls.
            step: Optimiser steps done.
        """
        return None

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Record a table, such as the samples of an evaluation.

        Args:
            name: `EVALUATION`, `TRAINING` or another name.
            columns: The names of the columns.
            rows: For each row one cell per column. A picture is a `tracking.pictures.Picture`, a subclass of str.
            step: Optimiser steps done.
        """
        return None

    def close(self) -> None:
        """Make everything logged so far permanent. Called once, also after an error."""
        return None


@dataclass
class RunInfo:
    """Hold the facts about a run that trackers get."""

    directory: Path  # the run folder
    config: dict[str, Any]  # the whole configuration; values that JSON does not support are shown as text
    project: str
    total_steps: int
    run_name: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    logging_dir: str | Path | None = None  # where the user wants other trackers' files; None: in `directory`
    resume_step: int | None = None  # steps done before this process continued the run; None: a fresh run
    state: dict[str, str] = field(default_factory=dict)  # in checkpoints: ids by which trackers find their run
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `train.tracker_kwargs`

    @property
    def name(self) -> str:
        """Return `run_name`, or the name of the run folder if there is none."""
        return self.run_name or self.directory.resolve().name


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry(
    "tracker",
    option="train.tracker",
    lazy={
        "jsonl": "trlx_like.tracking.jsonl:JsonlTracker",
        "report": "trlx_like.tracking.report:ReportTracker",
        "audit": "trlx_like.tracking.audit:AuditTracker",
        "console": "trlx_like.tracking.console:make_console",
        "wandb": "trlx_like.tracking.wandb:WandbTracker",
        "tensorboard": "trlx_like.tracking.tensorboard:TensorboardTracker",
        "trackio": "trlx_like.tracking.trackio:TrackioTracker",
        "mlflow": "trlx_like.tracking.accelerated:MlflowTracker",
        "swanlab": "trlx_like.tracking.accelerated:SwanlabTracker",
    },
)
register_tracker = TRACKERS.register

ALWAYS = ("report", "jsonl", "audit", "console")  # closed in the opposite order: the report reads what jsonl wrote


class Trackers:
    """Send metrics and tables to several trackers.

    Args:
        trackers: None on processes other than the main one, where every method does nothing.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send metrics to all trackers.

        Args:
            metrics: Values that `float()` accepts, such as 0-d tensors; trackers receive Python numbers.
            step: Optimiser steps done.

        Raises:
            RewardError: A value is not a number.
        """
        if not self._trackers:
            return
        numbers = {name: number(name, value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Send a table to all trackers; the arguments are those of `Tracker.log_table`."""
        for tracker in self._trackers:
            tracker.log_table(name, columns, rows, step)

    def log_use(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send a record of used rows to the trackers that keep one: those with a method of this name.

        Args:
            rows: A record for each round, or each step of a run on given data; see `trlx_like.tracking.ledger`.
            step: Optimiser steps done.
        """
        for tracker in self._trackers if rows else ():
            if (log_use := getattr(tracker, "log_use", None)) is not None:
                log_use(rows, step)

    def close(self) -> None:
        """Close all trackers, even if one of them raises. A second call does nothing."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in trackers:
                stack.callback(tracker.close)


def make_trackers(names: Sequence[str], run: RunInfo, main: bool) -> Trackers:
    """Make the trackers of a run: jsonl, console, audit, report, and those in `names`.

    Args:
        names: The trackers that `train.tracker` asks for.
        run: The facts about the run.
        main: Whether this is the main process; others log nothing.

    Raises:
        RegistryError: A name is unknown. Raised on every process.
        ConfigError: A tracker needs a package that is not installed.
    """
    extra = {TRACKERS.canonical(name): TRACKERS.get(name) for name in names}
    if not main:
        return Trackers()
    built: list[Tracker] = []
    try:
        # The named ones first: one that cannot start should leave the files of the run folder alone.
        for name in [name for name in extra if name not in ALWAYS] + list(ALWAYS):
            built.append(TRACKERS.get(name)(run))
    except BaseException:
        Trackers(built).close()
        raise
    return Trackers(built)


def started(tracker: str, start: Callable[..., T], run: RunInfo, /, **own: Any) -> T:
    """Start the library of a tracker with `own` arguments, and with those of `train.tracker_kwargs` before them.

    Raises:
        ConfigError: The library does not know an argument of `train.tracker_kwargs`, or refuses its type.
    """
    given = {key: value for name, of in run.options.items() if name.lower() == tracker for key, value in of.items()}
    try:
        return start(**{**own, **given})
    except TypeError as error:
        if not given:
            raise
        raise ConfigError(f"train.tracker_kwargs.{tracker} ({redacted(given)}): {error}") from error


def optional_package(tracker: str) -> AbstractContextManager[None]:
    """Turn a failed import in the block into a ConfigError that names the extra to install."""
    return needed(f'train.tracker ("{tracker}") needs a package that is not installed', tracker)
