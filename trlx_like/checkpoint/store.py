"""Publishes checkpoint folders atomically, and verifies them before they are used.

A checkpoint is written to a hidden folder next to its final place. When all processes are done, the main process
hashes every file into `manifest.json`, flushes files and folders to disk, and renames the folder. So a folder under
its final name is complete, even after a power failure, and later damage is found by the hashes.

Hidden folders: `.trlx_like-writing-<name>` is incomplete; `.trlx_like-old-<name>` is the previous `<name>` at the
moment in which it is replaced; `.trlx_like-removed-<name>` is being deleted. A run folder belongs to one run, so those
found at the next save are left over from a killed process, and are cleaned up.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from safetensors import SafetensorError

from trlx_like.checkpoint.beside import Beside
from trlx_like.checkpoint.manifest import MANIFEST, flush_folder, seal_folder, verify_folder
from trlx_like.errors import DISK, CheckpointError, another_failed, space

logger = logging.getLogger("trlx_like")

_WRITING, _OLD, _REMOVED = ".trlx_like-writing-", ".trlx_like-old-", ".trlx_like-removed-"
_INTACT = ".intact"  # a file that is deleted from the unfinished folder when a process fails
_RUST = re.compile(r"\(os error (\d+)\)$")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_STEP = re.compile(r"checkpoint_(\d+)", re.ASCII)


class CheckpointStore:
    """Manage the checkpoints of a run folder: `checkpoint_<step>`, and others under names such as `best_checkpoint`.

    Args:
        directory: The run folder, on a disk that all processes share.
        keep: How many of the newest `checkpoint_<step>` are kept; None keeps all.
        main: True on exactly one process.
        barrier: A function that returns when all processes have called it.
        owns: Tells by its name whether a folder there is a checkpoint of the run, which may be replaced and pruned;
            None: if it has a manifest.

    Raises:
        CheckpointError: If `keep` is below 1.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        main: bool = True,
        barrier: Callable[[], None] = lambda: None,
        owns: Callable[[str], bool] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep ({keep}) must be at least 1, or None to keep all checkpoints.")
        self.directory = Path(directory)
        self.keep = keep
        self.main = main
        self.barrier = barrier
        self.owns = owns or (lambda name: (self.directory / name / MANIFEST).exists())
        self._needed: Callable[[], int] = lambda: 0

    @contextmanager
    def publish(self, name: str, needed: Callable[[], int] = lambda: 0, beside: Beside | None = None) -> Iterator[Path]:
        """Publish a checkpoint: yield a folder for all processes to write into, then rename it to `directory/name`.

        A previous folder of that name is replaced. If anything fails on any process, the new folder is removed and the
        previous one stays. The process that failed raises its error, the main process raises too, and the others
        continue. All pass the same three barriers, so none is left waiting. This cannot hold for a process that is
        killed or fails within a collective operation of the block: the timeout of the process group ends the others.
        Ctrl-C leaves at once.

        Args:
            name: The name of the checkpoint.
            needed: Returns its size in bytes for the error of a disk that refuses; 0 if it is not known.
            beside: Writes tensors, hashes and publishes in a thread, after the block. The block must fail on all
                processes or on none, and mark each.

        Yields:
            The folder to write into.

        Raises:
            CheckpointError: If the name is invalid, the disk refuses, or (on the main process) another process failed.
        """
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot name a checkpoint: use only letters, digits, . _ -.")
        final, folder = self.directory / name, self.directory / f"{_WRITING}{name}"
        self._needed = needed
        failure = self._attempt(final, self._begin, folder, final) if self.main else None
        self.barrier()
        if not self.main:
            failure = self._attempt(final, _join, folder)
        if failure is None:
            try:
                with nullcontext() if beside is None else beside.copying():
                    yield folder
            except Exception as error:
                failure = self._refused(error, final) if _from_disk(error) else error
                with suppress(OSError):
                    (folder / _INTACT).unlink()
            except BaseException:
                if self.main:
                    _remove(folder)
                raise
        self.barrier()
        if beside is not None and failure is None:
            beside.start(lambda: self._publish_beside(beside, folder, final))
            return
        failure = self._published(failure, folder, final)
        self.barrier()
        if failure is not None:
            raise failure

    def _published(self, failure: Exception | None, folder: Path, final: Path) -> Exception | None:
        """Finish a checkpoint on the main process, or remove it; return why."""
        if self.main:
            failure = failure or self._attempt(final, self._finish, folder, final)
            if failure is not None:
                _remove(folder)
        return failure

    def _publish_beside(self, beside: Beside, folder: Path, final: Path) -> None:
        """Write this process's part of a checkpoint, and finish it on the main process once all parts are written."""
        failure = self._attempt(final, beside.write, folder)
        if self.main and not beside.all_written(folder):
            failure = failure or another_failed(final)
        failure = self._published(failure, folder, final)
        if failure is not None:
            raise failure

    def verify(self, path: str | Path) -> None:
        """Compare a checkpoint with its manifest.

        Args:
            path: The folder of the checkpoint.

        Raises:
            CheckpointError: If it has no manifest, or a file is damaged, missing or not listed; it names the first such
                file.
        """
        verify_folder(Path(path))

    def newest(self) -> Path | None:
        """Return the `checkpoint_<step>` of the highest step that is intact, or None. Others are logged."""
        return self._search()[0]

    def _search(self) -> tuple[Path | None, list[str]]:
        """Return the newest intact checkpoint, and what is wrong with those of higher steps."""
        wrong: list[str] = []
        for path in self._steps():
            if (damage := _damage(path)) is None:
                return path, wrong
            wrong.append(str(damage))
            logger.warning("Passing over a checkpoint: %s", damage)
        return None, wrong

    def _newest_of(self, spec: str) -> Path | None:
        """Return the newest intact checkpoint; raise a CheckpointError if there are some, and none is intact."""
        newest, wrong = self._search()
        if newest is not None or not wrong:
            return newest
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        others = [path for path in sorted(self.directory.iterdir()) if (path / MANIFEST).is_file()]
        whole = [path for path in others if path not in self._steps() and _damage(path) is None]
        advice = f"{whole[0]} is whole: resume from that, or choose" if whole else "Choose"
        raise CheckpointError(
            f"train.resume_from_checkpoint ({spec!r}): no checkpoint_<step> in {self.directory} can be used. "
            f"{' '.join(wrong[:3])}{more} {advice} another train.checkpoint_dir to start from the beginning."
        )

    def resolve(self, spec: str) -> Path | None:
        """Find the checkpoint that `train.resume_from_checkpoint` asks for, and verify it.

        Args:
            spec: "auto" for the newest in this run folder, the path of a checkpoint, or the path of a run folder, whose
                newest checkpoint is taken.

        Returns:
            The checkpoint; None for "auto" in a folder without any.

        Raises:
            CheckpointError: If there is no intact checkpoint where there should be one.
        """
        if spec == "auto":
            return self._newest_of(spec)
        path = Path(os.path.expanduser(spec))
        if not path.exists():
            path = _set_aside(path)
        if not path.is_dir():
            raise CheckpointError(f"train.resume_from_checkpoint ({spec!r}): there is no such folder.")
        run = CheckpointStore(path)
        if not (path / MANIFEST).exists() and run._steps():
            return run._newest_of(spec)
        if (damage := _damage(path)) is not None:
            raise CheckpointError(f"train.resume_from_checkpoint ({spec!r}): {damage}") from damage
        return path

    def _attempt(self, final: Path, action: Callable[..., None], *args: Path) -> Exception | None:
        """Run an action and return its exception, so that this process still meets the others at the barrier."""
        try:
            action(*args)
        except OSError as error:
            return self._refused(error, final)
        except Exception as error:
            return error
        return None

    def _refused(self, error: Exception, final: Path) -> CheckpointError:
        """Make the error for a disk that refuses: where, why, the bytes, and that nothing is lost."""
        why = f"{final} cannot be written: {str(error).rstrip('.')}. {space(self.directory, self._needed())}"
        refused = CheckpointError(f"{why} Earlier checkpoints are as they were.")
        refused.__cause__ = error
        return refused

    def _begin(self, folder: Path, final: Path) -> None:
        """Make the folder to write into."""
        if os.path.lexists(final) and not self.owns(final.name):
            raise CheckpointError(f"{final} is there already and is no checkpoint of this run: move it away.")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        folder.mkdir()
        (folder / _INTACT).touch()

    def _finish(self, folder: Path, final: Path) -> None:
        """Seal the written folder, give it its final name, and remove what it replaces."""
        if not (folder / _INTACT).exists():
            raise another_failed(final)
        (folder / _INTACT).unlink()
        seal_folder(folder)
        self._swap(folder, final)
        flush_folder(self.directory)
        flush_folder(self.directory.parent)
        _remove(_set_aside(final))
        self.prune(final)

    def _swap(self, folder: Path, final: Path) -> None:
        """Replace a checkpoint by two renames, between which the old one is found under its hidden name."""
        aside = _set_aside(final)
        if final.exists():
            final.rename(aside)
        try:
            os.replace(folder, final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise

    def prune(self, written: Path) -> None:
        """Remove the oldest checkpoints of the run beside one that was just written. Other folders stay.

        Args:
            written: The checkpoint. Nothing is removed beside one that is not named by its step.
        """
        if not _STEP.fullmatch(written.name):
            return
        steps = [path for path in self._steps() if path != written and self.owns(path.name.removeprefix(_OLD))]
        for path in steps[self.keep - 1 :] if self.keep else ():
            # Rename first: a half-deleted folder must not have the name of a checkpoint.
            try:
                _remove(path.rename(self.directory / f"{_REMOVED}{path.name}"))
            except OSError as error:
                logger.warning("The old checkpoint %s cannot be removed: %s", path, error)

    def clean(self) -> None:
        """Remove what killed saves left, and restore a checkpoint that was set aside for one that never came."""
        for path in sorted(self.directory.glob(".trlx_like-*")):
            final = self.directory / path.name.removeprefix(_OLD)
            if path.name.startswith(_OLD) and not final.exists():
                path.rename(final)
            elif path.name.startswith((_WRITING, _OLD, _REMOVED)):
                _remove(path)

    def _steps(self) -> list[Path]:
        """List the folders `checkpoint_<step>`, highest step first, including those set aside."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _STEP.fullmatch(path.name.removeprefix(_OLD))
            if match and path.is_dir():
                found.append((int(match[1]), not path.name.startswith(_OLD), path))
        return [path for *_, path in sorted(found, reverse=True)]


def _damage(path: Path) -> CheckpointError | None:
    """Compare a checkpoint with its manifest; return what is wrong, or None."""
    try:
        verify_folder(path)
    except CheckpointError as error:
        return error
    return None


def _join(folder: Path) -> None:
    """Check that the folder made by the main process is visible to this process.

    It tries to create the folder: unlike a look-up, that is answered by the server of a network disk and never by a
    cache.
    """
    try:
        folder.mkdir()
        folder.rmdir()
    except FileExistsError:
        return
    except OSError as error:
        logger.debug("%s: %s", folder, error)
    raise CheckpointError(
        f"{folder.parent} has nothing from the main process: that one failed, or train.checkpoint_dir is not on "
        "a disk that all machines share."
    )


def _from_disk(error: Exception) -> bool:
    """Return True for errors of the disk or caused by them, False for those of the network or of the code."""
    if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in DISK):
        return True
    number = _RUST.search(str(error))  # tokenizers raises a plain Exception
    if number is not None and int(number[1]) in DISK:
        return True
    return isinstance(error.__cause__, Exception) and _from_disk(error.__cause__)


def _set_aside(final: Path) -> Path:
    """Return the hidden name that a checkpoint has while it is being replaced."""
    return final.with_name(f"{_OLD}{final.name}")


def _remove(folder: Path) -> None:
    """Delete a folder if it exists. Failing to do so is logged, but does not end the run."""
    with suppress(FileNotFoundError):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("%s cannot be removed: %s", folder, error)
