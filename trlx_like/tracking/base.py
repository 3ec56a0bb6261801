"""What a tracker is, which there are, and the one object that a trainer talks to.

A tracker is a class that is constructed with a `RunInfo`. Registered under a name, `train.tracker` can ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trlx_like.errors import ConfigError
from trlx_like.registry import Registry
from trlx_like.tracking.values import number

EVALUATION, TRAINING = "samples", "training"
"""What the table of an evaluation's samples is called, and that of a round's."""
IMAGE = "image"
"""What the column of pictures is called in them."""


class Tracker(Protocol):
    """A destination of metrics and tables. Only the main process has trackers."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics by name. A step may be logged in several parts."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """A table, such as the samples of an evaluation: one cell a column in every row.

        A cell that is a picture is a `tracking.pictures.Picture`, which is a text.
        """

    def close(self) -> None:
        """Everything logged is kept from here on. Called once, also after an error."""


@dataclass
class RunInfo:
    """What a tracker may know about the run."""

    directory: Path  # the run folder
    config: dict[str, Any]  # to be shown; what JSON cannot hold is shown as text
    project: str
    total_steps: int
    run_name: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    logging_dir: str | Path | None = None  # where the user wants other trackers' files; None: in `directory`
    resume_step: int | None = None  # steps done before this process continued the run; None: a fresh run
    state: dict[str, str] = field(default_factory=dict)  # in checkpoints: ids by which trackers find their run

    @property
    def name(self) -> str:
        """How the run is called: `run_name`, else its folder."""
        return self.run_name or self.directory.resolve().name


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry(
    "tracker",
    lazy={
        "jsonl": "trlx_like.tracking.jsonl:JsonlTracker",
        "report": "trlx_like.tracking.report:ReportTracker",
        "audit": "trlx_like.tracking.audit:AuditTracker",
        "console": "trlx_like.tracking.console:ConsoleTracker",
        "wandb": "trlx_like.tracking.wandb:WandbTracker",
        "tensorboard": "trlx_like.tracking.tensorboard:TensorboardTracker",
        "trackio": "trlx_like.tracking.trackio:TrackioTracker",
    },
)
register_tracker = TRACKERS.register

ALWAYS = ("report", "jsonl", "audit", "console")  # closed in the opposite order: the report reads what jsonl wrote


class Trackers:
    """Several trackers as one. Without any it is silent, as on all processes but the main one.

    Values may be whatever `float()` takes, 0-d tensors included; the trackers get Python numbers.
    """

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Sends metrics to all. RewardError for a value that is not a number."""
        if not self._trackers:
            return
        numbers = {name: number(name, value) for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Sends a table to all."""
        for tracker in self._trackers:
            tracker.log_table(name, columns, rows, step)

    def close(self) -> None:
        """Closes all, also if one raises. Closing again does nothing."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:
            for tracker in trackers:
                stack.callback(tracker.close)


def make_trackers(names: Sequence[str], run: RunInfo, main: bool) -> Trackers:
    """The trackers of a run: jsonl, console, audit, the report, and those in `names` (`train.tracker`).

    main: False on processes that log nothing. RegistryError for an unknown name, on every process; ConfigError for a
    package that is not installed.
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


@contextmanager
def optional_package(tracker: str) -> Iterator[None]:
    """Turns a failing import inside into a ConfigError that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'train.tracker ("{tracker}") needs a package that is not installed ({error}): '
            f'pip install "trlx-like[{tracker}]".'
        ) from error
