"""A run folder belongs to one run at a time, and only files that a run made are ever moved, replaced or deleted.

`run_files.jsonl` in the folder is the list of these files, and the lock. It has one JSON object per line and is only
ever appended to, so that a kill costs at most its last line. A name is written to the list before the file is made.

The lock is the kernel's (`flock`). It ends with its process however that ends, so nothing is left over from a process
that was killed, and a process id that the system uses again does not matter. The list also names the process and the
host, for the error of the second run. Some network disks lock for one host only, or not at all. So the process
touches the file every few seconds, and a run that finds the name of another host waits and looks whether that goes on.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from trlx_like.errors import ConfigError, DiskError, space, writing
from trlx_like.meeting import is_alive
from trlx_like.reading import unusable

logger = logging.getLogger("trlx_like")

LIST = "run_files.jsonl"
HEADER = {"format": "trlx_like.run_files", "version": 1}
BEAT = 10.0
"""Seconds between two signs of life of a run."""
WATCH = 25.0
"""Seconds without a sign of life after which a run on another host counts as ended."""
LONG_AGO = 600.0
"""Seconds since the last sign of life after which nobody waits for another; clocks of hosts differ by less."""
RETRY = 1.0
"""Seconds to try again for a lock whose process may just be ending."""

_held: set[BinaryIO] = set()


def _let_go() -> None:
    """Close the lists in a forked process, which would keep their locks after this process has ended."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunFiles:
    """Keep the list of the files that runs made in a folder, and lock the folder for one of them.

    Args:
        directory: The run folder.
        option: The option that names it, for errors.
    """

    def __init__(self, directory: Path, option: str = "train.checkpoint_dir") -> None:
        self.directory, self._option = directory, option
        self.path = directory / LIST
        self._made: dict[str, None] = {}
        self._file: BinaryIO | None = None
        self._ended = threading.Event()

    def owns(self, name: str) -> bool:
        """Return whether a run made the file or folder of this name. The folder must be open."""
        return name in self._made

    def in_use(self) -> bool:
        """Return whether a process holds the folder. On a disk without locks a killed process seems to hold it."""
        _, holder, free = self._look()
        return free is None or (free is False and holder is not None)

    def check(self, names: Iterable[str]) -> None:
        """Find out whether `open` and `claim` would succeed, and change nothing.

        Args:
            names: The files that a run will make.

        Raises:
            ConfigError: If the folder cannot be written to, another run uses it, or a name is taken.
        """
        try:
            if why := unusable(self.directory):
                raise self._refusal(why)
            made, holder, free = self._look()
            if free is None:
                raise self._in_use(holder)
        except OSError as error:
            raise self._refusal(f"{error}.") from error
        self._refuse_taken(names, made)

    def open(self) -> None:
        """Make the folder and lock it for this process.

        Raises:
            ConfigError: If the folder cannot be written to, or another run uses it.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refusal(f"{error}. {space(self.path, len(json.dumps(HEADER)))}") from error
        try:
            with writing(self.path, len(json.dumps(HEADER))):
                self._take(file)
            self._file = file
            _held.add(file)
            self._ended = threading.Event()
            threading.Thread(target=_beat, args=(self.path, self._ended), daemon=True).start()
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            self._write({"run": {"pid": os.getpid(), "host": socket.gethostname(), "since": now}})
            self._forget_missing()
        except BaseException:  # such as a full disk: the folder is not held then
            self._ended.set()
            _held.discard(file)
            self._file = None
            file.close()
            raise

    def close(self) -> None:
        """Give the folder back."""
        assert self._file is not None
        self._ended.set()
        with suppress(DiskError):  # a full disk: the lock ends all the same
            self._forget_missing()
            self._write({"ended": os.getpid()})
        _held.discard(self._file)
        self._file.close()
        self._file = None

    def claim(self, names: Iterable[str]) -> None:
        """Add names to the list, before their files are made.

        Args:
            names: Files and folders directly in the run folder.

        Raises:
            ConfigError: If there is something of that name that no run made.
        """
        names = list(names)
        self._refuse_taken(names, self._made)
        if new := [name for name in names if name not in self._made]:
            self._write({"made": new})
            self._made.update(dict.fromkeys(new))

    @contextmanager
    def claimed(self, names: Iterable[str]) -> Iterator[None]:
        """Claim names in a `with` block outside of a run, as for a report. A run that has claimed them may go on.

        Raises:
            ConfigError: As `check`.
        """
        names = list(names)
        made, _, _ = self._look()
        if made.keys() >= set(names):
            yield
            return
        self.check(names)
        self.open()
        try:
            self.claim(names)
            yield
        finally:
            self.close()

    def set_aside(self, keep: str | None = None) -> Path | None:
        """Move all files of the list to a new folder `earlier_<n>`, with a list of its own; return it if there are any.

        That folder is a run folder, from which a run can be resumed.

        Args:
            keep: A name that stays.
        """
        names = [name for name in self._made if name != keep]
        if not names:
            return None
        number = 1
        while os.path.lexists(place := self.directory / f"earlier_{number}"):
            number += 1
        place.mkdir()
        (place / LIST).write_text(f"{json.dumps(HEADER)}\n{json.dumps({'made': names})}\n", encoding="utf-8")
        for name in names:
            (self.directory / name).rename(place / name)
        self._forget_missing()
        return place

    # The list.

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self._file is not None
        content = json.dumps(row).encode() + b"\n"
        with writing(self.path, len(content)):
            self._file.write(content)
            os.fsync(self._file.fileno())

    def _forget_missing(self) -> None:
        """Take names off the list whose files are gone: what gets such a name later is not the run's."""
        gone = [name for name in self._made if not os.path.lexists(self.directory / name)]
        if gone:
            self._write({"gone": gone})
        for name in gone:
            del self._made[name]

    def _look(self) -> tuple[Mapping[str, None], dict[str, Any] | None, bool | None]:
        """Read the list without opening the folder.

        Returns:
            The names on the list; the process that holds the folder, or was killed while it did; True if the lock
            is free, None if a process has it, False where the disk has no locks.
        """
        if not os.path.lexists(self.path):
            return {}, None, True
        if not self.path.is_file():  # a pipe or a device, whose reading may never end
            raise self._refusal(f"{self.path} is not the list of a run's files. Choose another folder.")
        with self.path.open("rb") as file:
            return *self._read(file), _lock(file.fileno(), shared=True)

    def _read(self, file: BinaryIO) -> tuple[dict[str, None], dict[str, Any] | None]:
        """Return the names on the list, and the process that holds the folder or was killed while it did."""
        file.seek(0)
        first, *lines = file.read().split(b"\n")
        if not first and not lines:
            return {}, None
        head = _row(first)
        if head.get("format") != HEADER["format"]:
            raise self._refusal(f"{self.path} is not the list of a run's files. Choose another folder.")
        if head.get("version") != HEADER["version"]:
            raise self._refusal(f"{self.path} is of version {head.get('version')}; this release reads version 1.")
        made: dict[str, None] = {}
        holder: dict[str, Any] | None = None
        for row in map(_row, lines):
            made.update(dict.fromkeys(row.get("made", ())))
            for name in row.get("gone", ()):
                made.pop(name, None)
            holder = row.get("run", None if "ended" in row else holder)
        return made, holder

    def _refuse_taken(self, names: Iterable[str], made: Mapping[str, None]) -> None:
        taken = [name for name in names if name not in made and os.path.lexists(self.directory / name)]
        if taken:
            raise self._refusal(
                f"a run would write {', '.join(taken)}, which no run has made (those are in {LIST}). Move "
                f"{'it' if len(taken) == 1 else 'them'} away, or choose another folder."
            )

    # The lock.

    def _take(self, file: BinaryIO) -> None:
        until = time.monotonic() + RETRY
        while (locked := _lock(file.fileno())) is None and time.monotonic() < until:
            time.sleep(0.05)
        self._made, holder = self._read(file)
        if locked is None:
            raise self._in_use(holder)
        if holder is not None:
            known = locked and holder.get("host") == socket.gethostname()  # its process has ended, says the kernel
            if not known and self._alive(holder):
                raise self._in_use(holder)
            logger.info("%s was used by %s, which has ended without a word.", self.directory, _named(holder))
        size = file.seek(0, os.SEEK_END)
        if not size:
            file.write(json.dumps(HEADER).encode() + b"\n")
        else:
            file.seek(size - 1)
            if file.read(1) != b"\n":  # a killed process left half a line
                file.write(b"\n")

    def _alive(self, holder: Mapping[str, Any]) -> bool:
        """Return whether a process gives signs of life whose end the kernel's lock cannot tell."""
        if holder.get("host") == socket.gethostname() and not is_alive(holder.get("pid")):
            return False
        seen = self.path.stat().st_mtime
        if time.time() - seen > LONG_AGO:
            return False
        logger.info(
            "%s was last used by %s: waiting %g seconds for a sign of life.", self.directory, _named(holder), WATCH
        )
        until = time.monotonic() + WATCH
        while time.monotonic() < until:
            time.sleep(min(1.0, WATCH / 10))
            with self.path.open("rb") as file:  # network disks look at the server when a file is opened
                if os.fstat(file.fileno()).st_mtime != seen:
                    return True
        return False

    def _in_use(self, holder: Mapping[str, Any] | None) -> ConfigError:
        user = "another process" if holder is None else _named(holder)
        return self._refusal(f"{user} is using it. Wait for that run, stop it, or choose another folder.")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self._option} ({str(self.directory)!r}): {why}")


def _row(line: bytes) -> dict[str, Any]:
    """Return the object in a line, or an empty one for a line that a kill cut short."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _lock(handle: int, shared: bool = False) -> bool | None:
    """Lock an open file; return None if another process has it, and False if the system or the disk has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        logger.debug("flock: %s", error)
        return False
    return True


def _beat(path: Path, ended: threading.Event) -> None:
    """Touch a file every `BEAT` seconds."""
    while not ended.wait(BEAT):
        with suppress(OSError):
            os.utime(path)


def _named(holder: Mapping[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')} (since {holder.get('since')})"
