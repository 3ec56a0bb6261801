"""Folders that are published whole or not at all, and verified before they are used.

A checkpoint is written to a hidden folder beside its place. When all processes are done the main one hashes
every file into `manifest.json`, flushes files and folders to disk, and renames the folder into place. So a
folder that has its name is complete, whenever the machine was switched off; damage that comes later is found
by the hashes.

Hidden folders: `.trlx_like-writing-<name>` is not finished, `.trlx_like-old-<name>` is what `<name>` was
until the moment in which it is replaced, `.trlx_like-removed-<name>` is being deleted. A run folder belongs
to one run: what is found of these at the next save was left by a killed process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trlx_like.errors import CheckpointError

logger = logging.getLogger("trlx_like")

MANIFEST = "manifest.json"
FORMAT = "trlx_like.checkpoint"
VERSION = 1

_WRITING, _OLD, _REMOVED = ".trlx_like-writing-", ".trlx_like-old-", ".trlx_like-removed-"
_INTACT = ".intact"  # in a folder that is being written, for as long as no process has failed
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_STEP = re.compile(r"checkpoint_(\d+)", re.ASCII)
_DESKTOP = {".DS_Store", "Thumbs.db", "desktop.ini"}  # left by file managers that somebody looked with
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


class CheckpointStore:
    """The checkpoints in a folder: `checkpoint_<step>`, and others by name.

    keep: how many of the newest `checkpoint_<step>` stay, None: all; main: True on one process; barrier:
    returns when all processes have called it. The folder must be on a disk that all of them see.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | None = None,
        main: bool = True,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep ({keep}) must be at least 1, or None to keep all checkpoints.")
        self.directory = Path(directory)
        self.keep = keep
        self.main = main
        self.barrier = barrier

    @contextmanager
    def publish(self, name: str) -> Iterator[Path]:
        """Yields a folder for all processes to write into; afterwards it is `directory/name`, complete.

        A folder that had the name is replaced. If anything fails on any process, the folder is removed and
        what was there stays. The process that failed raises its error (CheckpointError where the disk
        refused), the main one raises too; others go on. All pass the same three barriers, so that none is
        left waiting. That cannot hold for a process that is killed, or that fails within a collective of the
        body: there the process group's timeout ends the others. Nor for Ctrl-C, which leaves at once.
        """
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot name a checkpoint: letters, digits, . _ - only.")
        final, folder = self.directory / name, self.directory / f"{_WRITING}{name}"
        failure = self._attempt(final, self._begin, folder) if self.main else None
        self.barrier()
        if not self.main:
            failure = self._attempt(final, _join, folder)
        if failure is None:
            try:
                yield folder
            except Exception as error:
                failure = _refused(error, final) if _from_disk(error) else error
                with suppress(OSError):
                    (folder / _INTACT).unlink()
            except BaseException:
                if self.main:
                    _remove(folder)
                raise
        self.barrier()
        if self.main:
            failure = failure or self._attempt(final, self._finish, folder, final)
            if failure is not None:
                _remove(folder)
        self.barrier()
        if failure is not None:
            raise failure

    def verify(self, path: str | Path) -> None:
        """Raises CheckpointError naming the first file that is damaged, missing or not in the manifest."""
        path = Path(path)
        listed = _read_manifest(path)
        try:
            present = _list_files(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        # Compared as names: nothing is opened because a manifest says so.
        for name in sorted(listed.keys() - present.keys()):
            raise CheckpointError(f"{path}: {name} is missing.")
        for name in sorted(present.keys() - listed.keys()):
            raise CheckpointError(f"{path}: {name} is not in {MANIFEST}, so it was added later. Move it away.")
        for name, file in present.items():
            _check_file(file, name, listed[name])

    def newest(self) -> Path | None:
        """The `checkpoint_<step>` of the highest step that verifies. Logs those passed over, and why."""
        for path in self._steps():
            try:
                self.verify(path)
                return path
            except CheckpointError as error:
                logger.warning("Passing over a checkpoint: %s", error)
        return None

    def resolve(self, spec: str) -> Path | None:
        """The verified checkpoint that `train.resume_from_checkpoint` asks for.

        spec: "auto": `newest()`, None in a folder without any; or the path of a checkpoint, or of a run folder: its
        newest.
        Raises CheckpointError for a path without a good checkpoint.
        """
        if spec == "auto":
            newest = self.newest()
            if newest is None and self._steps():
                raise CheckpointError(
                    f"train.resume_from_checkpoint ('auto'): every checkpoint in {self.directory} is damaged; to start "
                    "again from the beginning choose another train.checkpoint_dir."
                )
            return newest
        path = Path(spec).expanduser()
        if not path.exists():
            path = _set_aside(path)
        if not path.is_dir():
            raise CheckpointError(f"train.resume_from_checkpoint ({spec!r}): there is no such folder.")
        run = CheckpointStore(path)
        if not (path / MANIFEST).exists() and run._steps():
            newest = run.newest()
            if newest is None:
                raise CheckpointError(f"train.resume_from_checkpoint ({spec!r}): every checkpoint is damaged.")
            return newest
        try:
            self.verify(path)
        except CheckpointError as error:
            raise CheckpointError(f"train.resume_from_checkpoint ({spec!r}): {error}") from error
        return path

    def _attempt(self, final: Path, action: Callable[..., None], *args: Path) -> Exception | None:
        """Runs an action and returns what it raised, so that this process still meets the others."""
        try:
            action(*args)
        except OSError as error:
            return _refused(error, final)
        except Exception as error:
            return error
        return None

    def _begin(self, folder: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clean()
        folder.mkdir()
        (folder / _INTACT).touch()

    def _finish(self, folder: Path, final: Path) -> None:
        if not (folder / _INTACT).exists():
            raise CheckpointError(f"{final} was not written: another process failed, its message says why.")
        (folder / _INTACT).unlink()
        _seal(folder)
        self._swap(folder, final)
        _flush_folder(self.directory)
        _flush_folder(self.directory.parent)
        _remove(_set_aside(final))
        if _STEP.fullmatch(final.name):
            self._prune(final)

    def _swap(self, folder: Path, final: Path) -> None:
        """Between the two renames the old checkpoint is found by its other name."""
        aside = _set_aside(final)
        if final.exists():
            final.rename(aside)
        try:
            os.replace(folder, final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise

    def _prune(self, written: Path) -> None:
        """Removes the oldest. Folders without a manifest are somebody else's."""
        steps = [path for path in self._steps() if path != written and (path / MANIFEST).exists()]
        for path in steps[self.keep - 1 :] if self.keep else ():
            # Renamed first: a folder that is half deleted must not bear the name of a checkpoint.
            try:
                _remove(path.rename(self.directory / f"{_REMOVED}{path.name}"))
            except OSError as error:
                logger.warning("The old checkpoint %s cannot be removed: %s", path, error)

    def _clean(self) -> None:
        """Removes what killed saves left. A checkpoint set aside for one that never came gets its name back."""
        for path in sorted(self.directory.glob(".trlx_like-*")):
            final = self.directory / path.name.removeprefix(_OLD)
            if path.name.startswith(_OLD) and not final.exists():
                path.rename(final)
            elif path.name.startswith((_WRITING, _OLD, _REMOVED)):
                _remove(path)

    def _steps(self) -> list[Path]:
        """Folders of steps, the highest first, those set aside included."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _STEP.fullmatch(path.name.removeprefix(_OLD))
            if match and path.is_dir():
                found.append((int(match[1]), not path.name.startswith(_OLD), path))
        return [path for *_, path in sorted(found, reverse=True)]


def _join(folder: Path) -> None:
    """Makes sure that the folder the main process made is this process's too.

    By making it: unlike a look, that asks the server of a network disk, and never its cache.
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
    """True of what a disk says, False of errors of the network or of the code that writes."""
    return isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in _DISK)


def _refused(error: Exception, final: Path) -> CheckpointError:
    """What the user needs to know when the disk refuses: where, why, and that nothing is lost."""
    refused = CheckpointError(f"{final} cannot be written: {error}. Earlier checkpoints are as they were.")
    refused.__cause__ = error
    return refused


def _set_aside(final: Path) -> Path:
    return final.with_name(f"{_OLD}{final.name}")


def _remove(folder: Path) -> None:
    """Deletes a folder if it is there. One that cannot be deleted is no reason to end a run."""
    with suppress(FileNotFoundError):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("%s cannot be removed: %s", folder, error)


def _list_files(folder: Path, prefix: str = "") -> dict[str, Path]:
    """The files of a checkpoint by their names in it (`hf_model/config.json`). Refuses links."""
    files: dict[str, Path] = {}
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                files |= _list_files(path, f"{prefix}{entry.name}/")
            elif not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{path} is a link or a device: a checkpoint has files and folders only.")
            elif entry.name not in _DESKTOP and (prefix or entry.name != MANIFEST):
                files[f"{prefix}{entry.name}"] = path
    return files


def _seal(folder: Path) -> None:
    """Writes the manifest and flushes everything to disk. Each file is read once."""
    files = {}
    for name, path in _list_files(folder).items():
        with FileIO(path, "r+" if os.name == "nt" else "r") as file:  # Windows flushes only what it may write
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[name] = {"size": file.tell(), "sha256": digest}
            os.fsync(file.fileno())
    with (folder / MANIFEST).open("w", encoding="utf-8") as manifest:
        json.dump({"format": FORMAT, "version": VERSION, "files": files}, manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
    for root, _, _ in os.walk(folder, topdown=False):
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Windows has no such call, and some network disks refuse it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _read_manifest(path: Path) -> dict[str, Any]:
    """What the manifest says of each file. CheckpointError if there is none or it is damaged."""
    manifest = path / MANIFEST
    try:
        if manifest.is_symlink():
            raise CheckpointError(f"{manifest} is a link: a checkpoint has files and folders only.")
        content = json.loads(manifest.read_bytes())
        kind, version, files = content["format"], content["version"], content["files"]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} has no {MANIFEST}: it is no checkpoint, or not all of one.") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is damaged: {error!r}") from error
    if kind != FORMAT or version != VERSION or not isinstance(files, dict):
        found = f"{kind!r}, version {version!r}"
        raise CheckpointError(f"{manifest} is {found}; this release reads {FORMAT!r}, version {VERSION}.")
    return files


def _check_file(path: Path, name: str, listed: Any) -> None:
    """Compares a file with its line in the manifest. The size first, as it costs nothing."""
    if not isinstance(listed, dict):
        raise CheckpointError(f"{MANIFEST} says nothing of {path}.")
    try:
        size = path.stat().st_size
        if size != listed.get("size"):
            raise CheckpointError(f"{path} is damaged: {size} bytes, and {listed.get('size')} were written.")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != listed.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content is not what was written.")
