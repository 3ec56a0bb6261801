"""Manifests: the names, sizes and SHA-256 hashes of all files of a checkpoint, to detect damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from trlx_like.errors import CheckpointError, raised_as

MANIFEST = "manifest.json"
FORMAT = "trlx_like.checkpoint"
VERSION = 1

SEALED, MARK = ".sealed.rank_", ".writing.rank_"
"""Files for the hashes of a process, and to tell that it has not failed, in a folder that is not sealed."""
_SHARED = f"{SEALED}shared.json"
LEAST_SHARED = 2**20
"""The least bytes of a file that two checkpoints share. Smaller ones are copied, since people edit them."""
_DESKTOP = {".DS_Store", "Thumbs.db", "desktop.ini"}  # created by file managers that merely showed the folder


def seal_own(folder: Path, rank: int) -> None:
    """Hash and flush the files that only this process has written, `rank_<r>/...` and `....rank_<r>.<suffix>`.

    `seal_folder` takes the hashes over, so that one process does not read what many have written.

    Args:
        folder: The folder.
        rank: The number of this process.

    Raises:
        OSError: If the disk refuses.
    """
    shared = json.loads((folder / _SHARED).read_bytes()) if (folder / _SHARED).exists() else {}
    listed = {
        name: _hashed(path)
        for name, path in _list_files(folder).items()
        if name not in shared and (f"/rank_{rank}/" in name or f".rank_{rank}." in path.name)
    }
    file = folder / f"{SEALED}{rank}.json"
    file.with_suffix(".new").write_text(json.dumps(listed), encoding="utf-8")
    file.with_suffix(".new").replace(file)  # others may look for it


def share_files(source: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Give a folder that is not sealed files of a sealed one beside it: large ones as hard links, others as copies.

    `seal_own` and `seal_folder` do not read what is linked again. Where the disk has no links, all are copies.

    Args:
        source: The sealed folder.
        folder: The other one.
        wanted: Whether a file of this name is wanted.

    Raises:
        CheckpointError: If the first has no manifest, or a damaged one.
        OSError: If the disk refuses.
    """
    linked = {}
    for name, entry in _read_manifest(source).items():
        if wanted(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                if entry["size"] >= LEAST_SHARED:
                    os.link(source / name, folder / name)
                    linked[name] = entry
            if name not in linked:
                shutil.copyfile(source / name, folder / name)
    (folder / _SHARED).write_text(json.dumps(linked), encoding="utf-8")


def _hashed(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a manifest, and flush the file to disk."""
    with FileIO(path, "r+" if os.name == "nt" else "r") as file:  # Windows flushes only files opened for writing
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": digest}


def seal_folder(folder: Path) -> None:
    """Write the manifest of a folder and flush its files and subfolders to disk. Each file is read once.

    Args:
        folder: The folder; nothing may be written into it afterwards.

    Raises:
        CheckpointError: If it contains links.
        OSError: If the disk refuses.
    """
    sealed: dict[str, Any] = {}
    for own in sorted(folder.glob(f"{SEALED}*.json")):
        sealed |= json.loads(own.read_bytes())
        own.unlink()
    for mark in folder.glob(f"{MARK}*"):
        mark.unlink()
    files = {}
    for name, path in _list_files(folder).items():
        of_process = sealed.get(name)
        whole = of_process is not None and of_process["size"] == path.stat().st_size
        files[name] = of_process if whole else _hashed(path)
    with (folder / MANIFEST).open("w", encoding="utf-8") as manifest:
        json.dump({"format": FORMAT, "version": VERSION, "files": files}, manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
    for root, _, _ in os.walk(folder, topdown=False):
        flush_folder(Path(root))


def verify_folder(path: Path) -> None:
    """Compare a folder with its manifest.

    Args:
        path: The folder.

    Raises:
        CheckpointError: If there is no manifest, or a file is damaged, missing or not listed; it names the first such
            file.
    """
    listed = _read_manifest(path)
    with raised_as(CheckpointError, OSError, f"{path} cannot be read"):
        present = _list_files(path)
    # Only names are compared: a file is never opened because a manifest lists it.
    for name in sorted(listed.keys() - present.keys()):
        raise CheckpointError(f"{path}: {name} is missing.")
    for name in sorted(present.keys() - listed.keys()):
        raise CheckpointError(f"{path}: {name} is not in {MANIFEST}, so it was added later. Move it away.")
    for name, file in present.items():
        _check_file(file, listed[name])


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, so that its file names survive a power failure.

    It does nothing on Windows, which has no such call, and on network disks that refuse it.

    Args:
        folder: The folder.
    """
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


def _list_files(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Map names in a checkpoint, such as `hf_model/config.json`, to paths. Raise CheckpointError for links."""
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


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the entries of a manifest by file name, or raise CheckpointError if it is missing or damaged."""
    manifest = path / MANIFEST
    try:
        if manifest.is_symlink():
            raise CheckpointError(f"{manifest} is a link: a checkpoint has files and folders only.")
        content = json.loads(manifest.read_bytes())
        kind, version, files = content["format"], content["version"], content["files"]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} has no {MANIFEST}: it is not a checkpoint, or an incomplete one.") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is damaged: {error!r}") from error
    if kind != FORMAT or version != VERSION or not isinstance(files, dict):
        found = f"{kind!r}, version {version!r}"
        raise CheckpointError(f"{manifest} is {found}; this release reads {FORMAT!r}, version {VERSION}.")
    return files


def _check_file(path: Path, listed: Any) -> None:
    """Compare a file with its entry in the manifest: first the size, which is cheap, then the hash."""
    if not isinstance(listed, dict):
        raise CheckpointError(f"{MANIFEST} does not describe {path}.")
    with raised_as(CheckpointError, OSError, f"{path} cannot be read"):
        size = path.stat().st_size
        if size != listed.get("size"):
            raise CheckpointError(f"{path} is damaged: {size} bytes, and {listed.get('size')} were written.")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != listed.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content is not what was written.")
