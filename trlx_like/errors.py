"""The exceptions that a user can correct. Each names the option or argument, its value, and what would be right.

`exit_code` is the exit code of the command line: 2 for a mistake of the user, another number if a calling program has
to tell the case apart. Any other exception is an error in this library, and shows its traceback.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from trlx_like.redact import redacted

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
"""The error numbers of a disk that refuses."""


class TrlxError(Exception):
    """Base class of every error that the user can correct."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        """Return the message without secrets."""
        return redacted(super().__str__())


class ConfigError(TrlxError):
    """Report a configuration that cannot run: an unknown key, a wrong type, an impossible value, or a conflict."""


class RegistryError(TrlxError):
    """Report a name that is not registered or is already taken, or a plugin that cannot be loaded."""


class DataError(TrlxError):
    """Report prompts, samples or files that cannot be trained on; the message names the row."""


class RewardError(TrlxError):
    """Report a reward or metric function that raised an exception or returned something unusable."""


class CheckpointError(TrlxError):
    """Report a checkpoint that is missing, damaged, or from another run."""


def another_failed(place: Path) -> CheckpointError:
    """Make the error of a process that cannot write a checkpoint because another process failed."""
    return CheckpointError(f"{place} was not written: another process failed, its message says why.")


class DiskError(TrlxError):
    """Report a disk that refuses a file of the run folder."""


class SamplerError(TrlxError):
    """Report a sampler that does not sample from the trained policy. Nothing was learned from its samples."""

    exit_code = 3


class ProcessError(TrlxError):
    """Report that another process of the run died, was stopped, or makes no progress."""

    exit_code = 1


class DivergenceError(TrlxError):
    """Report that training has diverged and `train.on_divergence` does not let it continue."""

    exit_code = 1


class NonFiniteError(DivergenceError):
    """Report that losses, gradients or updates were NaN or infinite. They changed no weight, unless it says so."""


Caught = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def raised_as(kind: type[TrlxError], caught: Caught, what: str) -> Iterator[None]:
    """Raise an error of this kind for one of a library in a `with` block: what is wrong, and the library's reason.

    Args:
        kind: The kind of error to raise.
        caught: The errors that it is raised for.
        what: The beginning of the message, which the reason follows.
    """
    try:
        yield
    except caught as error:
        raise kind(f"{what}: {error}") from error


@contextmanager
def writing(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise a DiskError if the disk refuses what is written in a `with` block.

    Args:
        path: The file or folder that is written, for the message.
        needed: Its size in bytes; 0 if that is not known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        why = os.strerror(error.errno)
        raise DiskError(
            f"{path} cannot be written: {why}. {space(path, needed)} The run can be resumed from its newest checkpoint."
        ) from error


def space(path: Path, needed: int) -> str:
    """Return a sentence with the bytes that are needed, if that is known, and those that are free on the disk."""
    want = f"About {needed:,} bytes are needed, and" if needed else "On its disk"
    for place in path.absolute().parents:
        try:
            return f"{want} {shutil.disk_usage(place).free:,} bytes are free."
        except OSError:  # it does not exist yet, or may not be looked at
            continue
    return ""
