"""The run folder: configuration, checkpoints, the files of trackers, and resuming from them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trlx_like.checkpoint import CheckpointStore, TrainState
from trlx_like.checkpoint.beside import Beside
from trlx_like.checkpoint.claim import RunFiles
from trlx_like.checkpoint.manifest import seal_own, share_files
from trlx_like.config import TRLConfig
from trlx_like.config.resume import Change
from trlx_like.distributed import World
from trlx_like.errors import CheckpointError, ConfigError, writing
from trlx_like.reading import unusable
from trlx_like.rewards.runner import FAULTS_FILE, OUTPUT_FILE
from trlx_like.sharing.card import add_card
from trlx_like.tracking import RunInfo, Trackers, make_trackers
from trlx_like.tracking.jsonl import FILES
from trlx_like.trainers.progress import Progress
from trlx_like.trainers.provenance import FILE as RECORD, changes_since, checked, made_with
from trlx_like.trainers.saving import Done, Saving

logger = logging.getLogger(__name__)

BEST = "best_checkpoint"
"""Name of the checkpoint of the best evaluation so far."""
HISTORY_FILE = "history.jsonl"
"""File of the run folder with what changed in the middle of the run, and when."""


class RunFolder:
    """Manage `train.checkpoint_dir` and everything in it. Every process must call every method.

    Args:
        config: The complete configuration.
        world: The processes of the run.
        given: The data and functions of the run, by the names of `train`'s arguments.

    Attributes:
        best: The checkpoint of the best evaluation so far.
        resumed: Whether the run goes on from a checkpoint, or from an earlier call of `learn`.
        changes: What differs from the checkpoint that the run was resumed from.
        source: That checkpoint, until it is noted in the history.
        reschedule: Called if a resume changes the optimizer's options or the schedule, or has neither of them.
    """

    def __init__(self, config: TRLConfig, world: World, given: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.world = world
        self.given = dict(given or {})
        self.directory = Path(os.path.expanduser(config.train.checkpoint_dir))
        self.best = self.directory / BEST
        self.files = RunFiles(self.directory)
        self.resumed = False
        self.saving = Saving(config.train, world)
        self.changes: list[Change] = []
        self.source: Path | None = None
        self.reschedule: Callable[[], None] = lambda: None
        self._held = False

    @cached_property
    def made_with(self) -> dict[str, Any]:
        """Options, data, functions and versions of the run, which checkpoints record and a resume compares."""
        return made_with(self.config, self.given)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this run in a `with` block. Within another such block it does nothing.

        Raises:
            ConfigError: If the folder cannot be used, another run uses it, or it has a file of a name that is needed.
        """
        if self._held:
            yield
            return
        self.world.on_main(self._open)
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.saving.end()
            if self.world.main:
                self.files.close()

    @staticmethod
    def check(config: TRLConfig) -> None:
        """Raise the ConfigError that `held` would raise, as far as it can be known without touching anything."""
        RunFiles(Path(os.path.expanduser(config.train.checkpoint_dir))).check(names_of(config))
        for name in ("logging_dir", "rollout_logging_dir"):
            folder = getattr(config.train, name)
            if folder is not None and (why := unusable(Path(os.path.expanduser(folder)))):
                raise ConfigError(f"train.{name} ({folder!r}): {why}")

    def _open(self) -> None:
        self.check(self.config)
        self.files.open()

    def announce(self, name: str, device: torch.device) -> None:
        """Log the first line of a run: trainer, processes, device, and length."""
        train, processes = self.config.train, self.world.size
        if self.world.main:
            logger.info(
                f"{name}: {processes} process{'es' * (processes > 1)} on {device.type}, "
                f"at most {train.total_steps} steps of {train.batch_size} samples."
            )

    def checkpoints(self, directory: Path | None = None) -> CheckpointStore:
        """Return the store of checkpoints in a folder, by default the run folder."""
        return CheckpointStore(
            directory or self.directory,
            keep=self.config.train.keep_checkpoints,
            main=self.world.main,
            barrier=self.world.barrier,
            owns=self.files.owns if directory is None else None,
        )

    def load(self, wanted: str | Path, state: TrainState) -> None:
        """Restore the state from a checkpoint. All processes load the one that the main process finds.

        Args:
            wanted: A checkpoint, or a run folder for its newest checkpoint, or "auto" for this run folder's newest
                checkpoint if there is one.
            state: The state to restore.
        """
        self.saving.settle()
        found = self.world.on_main(lambda: self._found(str(wanted)))
        if found is None:
            self._say("No checkpoint in %s yet: starting from the beginning.", self.directory)
            return
        self.source, self.changes = found
        # A schedule's state holds learning rates, which would win over changed ones.
        anew = any(change.option.startswith(("optimizer.", "scheduler.")) for change in self.changes)
        state.load(self.source, self.world.rank, self.world.size, skip=("scheduler",) if anew else ())
        if anew or not self.config.train.save_optimizer:
            self.reschedule()
        self.resumed, self.saving.saved = True, self.source
        self._say("Resumed from %s.", self.source)

    def _found(self, wanted: str) -> tuple[Path, list[Change]] | None:
        """Return the checkpoint to load and what has changed since; raise CheckpointError if that is refused."""
        place, force = self.checkpoints().resolve(wanted), self.config.train.force_resume
        if place is None:
            return None
        try:
            changes = changes_since(place, self.config, self.made_with)
        except CheckpointError as error:
            if not force:
                raise
            logger.warning("%s", error)
            return place, []
        lines = checked(changes, place, force)
        if changes:
            logger.info("Changed since %s was written:\n%s", place, lines)
        return place, changes

    def begin(self, step: int) -> None:
        """Make room for the files of the run, and note in history.jsonl where it goes on and which options changed.

        Args:
            step: Optimiser steps done.
        """
        self.world.barrier()  # all have read the checkpoint, which may be under a hidden name that is cleaned up
        if self.world.main:
            file, new = (self.directory / name for name in ("config.yml", "config.yml.tmp"))
            with writing(file):
                self.files.claim([new.name])
                self.config.dump_yaml(new)
                if not self.resumed:
                    self._make_room(file, new)
                self.files.claim(names_of(self.config))
                os.replace(new, file)
                self.checkpoints().clean()  # a killed run may have nothing left to save
                if self.source and self.source.is_dir() and self.source.parent == self.checkpoints().directory:
                    self.checkpoints().prune(self.source)
        self.note(
            {
                "event": "resumed" if self.source else "continued" if self.resumed else "started",
                "step": step,
                "from": self.source and str(self.source),
                "changes": [vars(change) for change in self.changes],
                "versions": self.made_with["versions"],
                "processes": self.world.size,
                "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
        )
        self.source, self.changes = None, []

    def _make_room(self, file: Path, new: Path) -> None:
        """Set the files of an earlier run aside, or remove the rows of this run that it will write again."""
        if self.config.train.resume_from_checkpoint == "auto" and _same_but_for_resuming(file, new):
            for name in FILES:  # the run was killed before its first checkpoint
                (self.directory / name).unlink(missing_ok=True)
        elif (earlier := self.files.set_aside(keep=new.name)) is not None:
            logger.info("%s has files of an earlier run; they are kept in %s.", self.directory, earlier.name)

    def open_trackers(self, progress: Progress) -> Trackers:
        """Open the trackers, which continue the files of a resumed run.

        Args:
            progress: The position of the run, with the ids that trackers resume by.
        """
        train = self.config.train
        info = RunInfo(
            directory=self.directory,
            config=self.config.recorded(),
            project=train.project_name,
            run_name=train.run_name,
            entity=train.entity_name,
            group=train.group_name,
            tags=train.tags,
            logging_dir=train.logging_dir and os.path.expanduser(train.logging_dir),
            options=train.tracker_kwargs,
            total_steps=train.total_steps,
            resume_step=progress.step if self.resumed and progress.step else None,
            state=progress.tracker,
        )
        self.resumed = True  # a trainer that learns on continues them
        return make_trackers(train.trackers, info, self.world.main)

    def save(
        self,
        state: TrainState,
        export: Callable[[Path], None],
        step: int,
        path: str | Path | None = None,
        done: Done = lambda place: None,
        like: Path | None = None,
    ) -> None:
        """Write a checkpoint completely or not at all.

        Args:
            state: Everything that a resume restores.
            export: Writes the model as plain Hugging Face files into a given folder.
            step: Optimiser steps done; they name the folder.
            path: Folder of the checkpoint; None for `checkpoint_<step>` in the run folder.
            done: Called with the folder once it is complete.
            like: A checkpoint in the run folder of the same weights, whose large files this one shares.

        Raises:
            CheckpointError: If it was not written, on every process; also of the one before, after this one is written.
        """
        self.saving.settle()
        width = len(str(self.config.train.total_steps))
        place = Path(path) if path is not None else self.directory / f"checkpoint_{step:0{width}d}"
        inside = place.parent.absolute() == self.directory.absolute()

        beside = self.saving.beside if inside else None

        def needed() -> int:
            return sum(state.sizes.values()) + state.sizes.get("model", 0)  # the export has the weights again

        def write() -> None:
            store = self.checkpoints(None if inside else place.parent)
            with store.publish(place.name, needed, beside) as folder:
                if like is not None:  # before any process hashes its files
                    self.world.all_or_none(lambda: self._share(like, folder, state), place)
                self.world.all_or_none(lambda: self._write_state(state, folder, beside, like is None), place)
                if like is None:
                    export(folder / "hf_model")

        with self.held() if inside else nullcontext():
            if inside:
                self.world.on_main(lambda: self.files.claim([place.name]))
            self.world.all_or_none(write, place)
        self.saving.note(place, done, beside)
        self.saving.check()

    def new_best(self, before: float | None, progress: Progress) -> Path | None:
        """Return the best checkpoint if one was written since `progress.best` was `before`, otherwise None."""
        self.saving.settle()  # one that the disk refuses is not the best
        return None if progress.best == before else self.best

    def _share(self, like: Path, folder: Path, state: TrainState) -> None:
        """Share the files of large items, and those of the export."""
        if self.world.main:
            share_files(like, folder, lambda name: name.startswith("hf_model/") or state.is_large(name))

    def _write_state(self, state: TrainState, folder: Path, beside: Beside | None, large: bool) -> None:
        state.save(folder, self.world.rank, self.world.main, large=large)
        if beside is not None:
            beside.mark(folder)
        else:
            seal_own(folder, self.world.rank)
        if self.world.main:
            (folder / RECORD).write_text(json.dumps(self.made_with, indent=1), encoding="utf-8")

    def export(self, write: Callable[[], None], directory: Path, step: int) -> None:
        """Write the model to a folder on the main process, with a model card unless it is part of a checkpoint."""

        def written() -> None:
            if self.world.main:
                write()
                if self.resumed and not (directory.parent / RECORD).exists():
                    add_card(directory, self.directory, step)

        self.world.all_or_none(written, directory)

    def note(self, event: Mapping[str, Any]) -> None:
        """Append what happened to history.jsonl, from the main process."""
        if self.world.main:
            file = self.directory / HISTORY_FILE
            with writing(file), file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(event) + "\n")

    def _say(self, message: str, place: Path) -> None:
        if self.world.main:
            logger.info(message, place)


def _same_but_for_resuming(file: Path, other: Path) -> bool:
    """Return whether two config.yml describe the same run, continued or not. False if the first does not exist."""
    if not file.is_file():
        return False
    texts = (path.read_bytes().split(b"\n") for path in (file, other))
    one, two = ([line for line in text if not line.startswith(b"  resume_from_checkpoint:")] for text in texts)
    return one == two


def names_of(config: TRLConfig) -> list[str]:
    """Return the names that a run may give to files in its folder, beside checkpoints and the files of trackers."""
    logs = (*FILES, "report.html", "config.yml")
    others = (HISTORY_FILE, "nonfinite_steps.jsonl", FAULTS_FILE, OUTPUT_FILE, "report.html.new")
    best = [BEST] * config.train.save_best
    return [*logs, *(f"{name}.tmp" for name in logs), *others, *best]
