"""Files and folders that a user names: only regular files are read, up to a size, and only folders are written to."""

from __future__ import annotations

import errno
import os
import stat
from importlib.resources import files
from pathlib import Path

KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
"""What a path may be beside a file or a folder, by the type bits of its mode. Reading these may never end."""


KERNEL = ("/proc/", "/sys/")
"""Folders whose files the kernel makes up: reading some never ends, and none can be made."""


def packaged_text(file: str) -> str:
    """Read a text that is part of the package: its path in the package."""
    return (files("trlx_like") / file).read_text(encoding="utf-8")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        most: The greatest size in bytes; None: any.

    Returns:
        The content.

    Raises:
        OSError: If it cannot be read, is a pipe, a device or a socket, or is larger than `most`. `strerror` says which.
    """
    check_regular(path)
    size = path.stat().st_size
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {most:,} are read", str(path))
    return path.read_bytes()


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Return in words why the text of a file cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start})"
    words = {FileNotFoundError: f"there is no such file in {Path.cwd()}", IsADirectoryError: "is a folder"}
    return words.get(type(error), f"cannot be read ({error.strerror or error})")


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe, a device, a socket or a file of the kernel, a NUL character, or without such a file."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot contain the character NUL", str(path))
    kind = KINDS.get(stat.S_IFMT(path.stat().st_mode)) or ("a file of the kernel" if of_kernel(path) else None)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file; write its content to a file", str(path))


def of_kernel(path: Path) -> bool:
    """Return whether a path is in a file system that the kernel makes up, after its links were followed."""
    return f"{path.resolve()}/".startswith(KERNEL)


def unusable(folder: Path) -> str | None:
    """Return why files cannot be written to a folder that may have to be made; None if they can be."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder."
    if str(folder).startswith("~"):
        return "there is no such user."
    if of_kernel(place) or not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written to."
    return None


def unwritable(text: str) -> str | None:
    """Return why a text cannot be written as UTF-8: it has a lone surrogate, such as "\\ud800". None if it can be."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1} is half of a surrogate pair (\\u{ord(text[error.start]):04x}), not text"
    return None
