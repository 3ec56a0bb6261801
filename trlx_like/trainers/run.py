"""The run folder: configuration, checkpoints, what trackers write, and how a run is found again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trlx_like.checkpoint import CheckpointStore, TrainState
from trlx_like.config import TRLConfig
from trlx_like.distributed import World
from trlx_like.errors import ConfigError
from trlx_like.tracking import RunInfo, Trackers, make_trackers

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a run is. All of it is in every checkpoint."""

    step: int = 0  # optimiser steps done
    round: int = 0  # rounds begun; a round is: make experience, then optimise on it
    position: int = 0  # batches of this round done
    in_round: bool = False
    shown: int | None = None  # step before the round whose samples were last shown
    best: float | None = None  # best value of the metric that `train.save_best` watches
    tracker: dict[str, str] = field(default_factory=dict)  # ids by which trackers find their run again

    @property
    def fresh(self) -> bool:
        """Whether the next step is the first on this round's experience."""
        return self.in_round and self.position == 0

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "tracker": dict(self.tracker)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


class RunFolder:
    """`train.checkpoint_dir` and everything in it. Every method is called by all processes."""

    def __init__(self, config: TRLConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.directory = Path(config.train.checkpoint_dir)
        self.resumed = False

    def announce(self, name: str, device: torch.device) -> None:
        """The first line of a run."""
        train, processes = self.config.train, self.world.size
        if self.world.main:
            logger.info(
                f"{name}: {processes} process{'es' * (processes > 1)} on {device.type}, "
                f"at most {train.total_steps} steps of {train.batch_size} samples."
            )

    def checkpoints(self, directory: Path | None = None) -> CheckpointStore:
        return CheckpointStore(
            directory or self.directory,
            keep=self.config.train.keep_checkpoints,
            main=self.world.main,
            barrier=self.world.barrier,
        )

    def resume(self, state: TrainState) -> None:
        """Follows `train.resume_from_checkpoint`."""
        wanted = self.config.train.resume_from_checkpoint
        if wanted is not None:
            self.load(wanted, state)

    def load(self, wanted: str | Path, state: TrainState) -> None:
        """Restores the state from a checkpoint, a run folder's newest, or with "auto" this run's newest if any.

        The main process chooses, so that all load the same one.
        """
        found = self.checkpoints().resolve(str(wanted)) if self.world.main else None
        found = self.world.broadcast(found)
        if found is None:
            self._say("No checkpoint in %s yet: starting from the beginning.", self.directory)
            return
        state.load(found, self.world.rank, self.world.size)
        self.resumed = True
        self._say("Resumed from %s.", found)

    def _set_aside(self) -> None:
        """Moves an earlier run's checkpoints, faults and images away: nothing is lost, and no runs are mixed up."""
        names = ("checkpoint_*", "best_checkpoint", "reward_*", "images")
        old = [path for name in names for path in self.directory.glob(name)]
        if not old:
            return
        number = 1 + len(list(self.directory.glob("earlier_*")))
        place = self.directory / f"earlier_{number}"
        place.mkdir()
        for path in old:
            path.rename(place / path.name)
        logger.info("%s has files of an earlier run; they are kept in %s.", self.directory, place.name)

    def open_trackers(self, progress: Progress) -> Trackers:
        """Writes config.yml and opens the trackers, which continue the files of a resumed run."""
        train = self.config.train
        if self.world.main:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self.resumed:
                self._set_aside()
            self.config.dump_yaml(self.directory / "config.yml")
        info = RunInfo(
            directory=self.directory,
            config=self.config.to_dict(),
            project=train.project_name,
            run_name=train.run_name,
            entity=train.entity_name,
            group=train.group_name,
            tags=train.tags,
            logging_dir=train.logging_dir,
            total_steps=train.total_steps,
            resume_step=progress.step if self.resumed and progress.step else None,
            state=progress.tracker,
        )
        self.resumed = True  # a trainer that learns on continues them
        return make_trackers(train.trackers, info, self.world.main)

    def save(
        self, state: TrainState, export: Callable[[Path], None], step: int, path: str | Path | None = None
    ) -> Path:
        """Publish a checkpoint and return its folder.

        Args:
            state: everything that a resume restores.
            export: writes the model as plain Hugging Face files into the folder it is given.
            step: optimiser steps done, which name the folder.
            path: where the checkpoint goes in place of `checkpoint_<step>` in this folder.
        """
        width = len(str(self.config.train.total_steps))
        place = Path(path) if path is not None else self.directory / f"checkpoint_{step:0{width}d}"
        with self.checkpoints(place.parent).publish(place.name) as folder:
            state.save(folder, self.world.rank, self.world.main)
            export(folder / "hf_model")
        self._say("Saved %s.", place)
        return place

    def _say(self, message: str, place: Path) -> None:
        if self.world.main:
            logger.info(message, place)

    def is_best(self, progress: Progress, metrics: Mapping[str, float]) -> bool:
        """Whether the metric that `train.save_best` watches is the highest so far. NaN is never best."""
        if not self.config.train.save_best:
            return False
        value = watched(metrics, self.config.train.best_metric)
        if value is None or math.isnan(value) or (progress.best is not None and value <= progress.best):
            return False
        progress.best = value
        return True


def watched(metrics: Mapping[str, float], name: str | None) -> float | None:
    """The value that says which checkpoint is best: the highest of a sweep's.

    name: `train.best_metric`; None: reward/mean, else metrics/reward, else none. ConfigError for a name that the
    evaluation does not report.
    """
    for wanted in ("reward/mean", "metrics/reward") if name is None else (name,):
        values = [v for key, v in metrics.items() if key == wanted or key.startswith(f"{wanted}@")]
        if values:
            return max(values)
    if name is not None:
        raise ConfigError(f"train.best_metric ({name!r}) is not reported by the evaluation: {', '.join(metrics)}.")
    return None


def require(config: TRLConfig, names: Iterable[str], given: Mapping[str, Any]) -> None:
    """ConfigError that says which argument of `train` the trainer cannot do without, if it is not there.

    A name may be two, "reward_fn or judge": then one of them will do.
    """
    for name in names:
        either = name.split(" or ")
        if all(given.get(one) is None for one in either):
            ways = " or ".join(f"train({one}=...)" for one in either)
            keys = " or ".join(f"data.{one}" for one in either)
            raise ConfigError(f"{config.train.trainer} needs {name}: pass {ways} or set {keys}.")
