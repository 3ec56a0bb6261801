"""Writes metrics.jsonl, samples.jsonl and ledger.jsonl, the run's own record, which other parts rely on.

Each line is one JSON object, written at once and flushed, so that a killed run loses at most the line it was writing.
NaN and infinities are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from trlx_like.errors import DiskError, writing
from trlx_like.tracking.base import RunInfo, Tracker
from trlx_like.tracking.folder import read_row
from trlx_like.tracking.values import plain

logger = logging.getLogger(__name__)

FILES = ("metrics.jsonl", "samples.jsonl", "ledger.jsonl")
# JSON allows these inside strings, but many readers end a line at them.
LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


class JsonlTracker(Tracker):
    """Write lines `{"step": 3, "reward/mean": 0.5, ...}` and `{"step": 3, "table": "samples", "prompt": ...}`.

    Adds `time/elapsed`, the seconds of the run so far without the time between a stop and a resume. A resumed run drops
    the rows of steps that it will repeat. A fresh run moves older files aside.
    """

    def __init__(self, run: RunInfo) -> None:
        last_row = None
        with writing(run.directory):
            run.directory.mkdir(parents=True, exist_ok=True)
            if run.resume_step is None:
                _move_aside(run.directory)
            else:
                last_row, *_ = (_keep_until(run.directory / name, run.resume_step) for name in FILES)
            opened = [(run.directory / name).open("ab", buffering=0) for name in FILES]
        self._metrics, self._samples, self._ledger = opened
        elapsed = (last_row or {}).get("time/elapsed", 0.0)
        self._start = time.monotonic() - (elapsed if isinstance(elapsed, float | int) else 0.0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        elapsed = round(time.monotonic() - self._start, 3)
        _write(self._metrics, [{"step": step, **metrics, "time/elapsed": elapsed}])

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        # A column with the name of one of our own two keys gets an underscore.
        keys = [f"{column}_" if column in ("step", "table") else column for column in columns]
        head = {"step": step, "table": name}
        _write(self._samples, [{**head, **dict(zip(keys, row, strict=True))} for row in rows])

    def log_use(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        _write(self._ledger, [{"step": step, **row} for row in rows])

    def close(self) -> None:
        with self._metrics, self._samples, self._ledger:
            pass


def _write(file: FileIO, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(plain(row), ensure_ascii=False).translate(LINE_ENDS) + "\n" for row in rows)
    # Half of a surrogate pair has no UTF-8; as a backslash escape it is good JSON.
    content = lines.encode("utf-8", "backslashreplace")
    before, left = file.seek(0, os.SEEK_END), memoryview(content)
    try:
        with writing(Path(str(file.name)), len(content)):
            while left:
                left = left[file.write(left) :]
    except DiskError:
        with suppress(OSError):
            file.truncate(before)  # no half of a line
        raise


def _move_aside(directory: Path) -> None:
    """Rename the files of an earlier run to metrics.1.jsonl and so on, or to the next free number."""
    old = [path for path in (directory / name for name in FILES) if path.is_file() and path.stat().st_size]
    place = 1
    while any((directory / name).with_suffix(f".{place}.jsonl").exists() for name in FILES):
        place += 1
    for path in old:
        kept = path.with_suffix(f".{place}.jsonl")
        path.rename(kept)
        logger.info("%s belongs to an earlier run and is kept as %s.", path, kept.name)


def _keep_until(path: Path, step: int) -> dict[str, Any] | None:
    """Drop the rows of steps after `step` and lines that are not rows; return the last row that is left.

    The file is replaced as a whole, so that a kill in between loses nothing.
    """
    if not path.is_file():
        return None
    last, later, torn = None, 0, 0
    rewritten = path.with_suffix(".jsonl.tmp")
    with path.open("rb") as source, rewritten.open("wb") as target:
        for line in source:
            row = read_row(line)
            if row is None:
                torn += 1
            elif row["step"] > step:
                later += 1
            else:
                last = row
                target.write(line.removesuffix(b"\n") + b"\n")  # a killed process may have left it without an end
        target.flush()
        os.fsync(target.fileno())
    os.replace(rewritten, path)
    if later or torn:
        logger.info("%s: dropped %d rows after step %d and %d torn lines.", path, later, step, torn)
    return last
