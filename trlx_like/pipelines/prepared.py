"""Keeping encoded data, and tables as text, so that the next start with the same data, tokenizer and options is quick.

A file is named by a digest of everything that it was made from, and by a digest of its own content. It is written under
another name first, and mapped to memory when it is read. Left out on purpose: `datasets`, which keeps its own copy of
the rows, names functions by pickling them, and does not notice a damaged file; and locks: processes that prepare the
same data at the same time each write the same file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from trlx_like.data.flat import Flat, FlatRows
from trlx_like.errors import DataError
from trlx_like.pipelines.lines import FEWEST, JsonLines, compact
from trlx_like.pipelines.rows import checked_rows
from trlx_like.pipelines.tokens import TextEncoder, texts_of

logger = logging.getLogger(__name__)

VARIABLE = "TRLX_LIKE_CACHE"
"""The environment variable that names the folder. If it is empty, nothing is kept."""
FORMAT = 4
"""To be raised when data is read, checked or encoded in another way, so that files of before are not used."""
MOST_BYTES = 50 * 2**30
"""Most bytes of all files. Those that were not used for the longest time are removed."""
SECONDS = 10
"""Seconds between two lines of the log on how many rows are prepared."""
CHUNK = 1000
"""Rows that are given to the tokenizer at once."""
_NOT_KEPT = "Prepared data cannot be kept in %s (%s); set %s to another folder."

R = TypeVar("R", bound=Flat)


def prepared(
    kind: type[R],
    rows: Sequence[Any],
    read: tuple[Callable[[Any], Any], Sequence[str]],
    encode: Callable[[Any, int], R | None],
    encoder: TextEncoder,
    *options: Any,
    name: str,
) -> FlatRows[R]:
    """Return rows that were encoded before, or encode and keep them.

    Args:
        kind: The class of encoded rows.
        rows: The rows as they were given.
        read: Brings a row to the form that `encode` reads, and the columns of the texts that it has then.
        encode: Encodes a row that was read, given its number; None: it is left out.
        encoder: Encodes texts.
        *options: JSON values that the encoding depends on.
        name: The name of the rows in errors and in the log.

    Raises:
        DataError: A row cannot be used.
    """

    def encoded() -> Iterator[R]:
        for start, part in chunks(rows):
            known = [read[0](row) for row in checked_rows(part, name, start)]
            encoder.read_ahead(text for row in known for text in texts_of(row, *read[1]))
            made = (encode(row, number) for number, row in enumerate(known, start))
            yield from (row for row in made if row is not None)

    folder = cache_folder() if len(rows) >= FEWEST else None
    around = [encoder.before, encoder.after, encoder.before_output, encoder.start, encoder.eos]
    key = None if folder is None else digest(encoder.tokenizer, kind.__qualname__, around, options, rows)
    if folder is not None and key is not None and (kept := _read(folder, key)) is not None:
        logger.info("%s: %s rows were prepared before, in %s.", name, f"{len(rows):,}", folder)
        return FlatRows(kind, kept)
    made = FlatRows.collect(kind, _watched(encoded(), len(rows), name))
    if folder is not None and key is not None and _write(folder, key, made.arrays()):
        return FlatRows(kind, _read(folder, key) or made.arrays())  # in place of the arrays in memory
    return made


def kept_text(rows: Iterable[Any], *about: Any) -> list[Any] | JsonLines:
    """Return rows as `compact` does, from a file if their text was kept before.

    Args:
        rows: The rows. They are only read if there is no such file.
        *about: JSON values that tell what the rows are.
    """
    folder, key = cache_folder(), ""
    with suppress(TypeError, ValueError):
        key = hashlib.sha256(json.dumps([FORMAT, *about]).encode()).hexdigest()[:32]
    if folder is None or not key:
        return compact(rows)
    if (kept := _read(folder, key)) is None:
        made = compact(rows)
        if isinstance(made, list) or not _write(folder, key, made.arrays()):
            return made
        kept = _read(folder, key) or made.arrays()
    return JsonLines(**kept)


class SameRows:
    """Refuse to resume a run with data that differ from those of its beginning, register it with a run's state.

    A checkpoint holds the experience made from the first data, so changed ones would silently be ignored.

    Args:
        data: The rows of this run, in one or more sets.
        fields: Their fields that count.
        name: Their name in errors.
    """

    def __init__(self, data: Sequence[FlatRows[Any]], fields: Sequence[str], name: str) -> None:
        self.name = name
        total = hashlib.sha256()
        for rows in data:
            for field in fields:
                for values in (rows.lengths(field), rows.values(field)):
                    total.update(np.ascontiguousarray(values).data)
        self.state = {"rows": sum(map(len, data)), "sha256": total.hexdigest()}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows and their digest."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with the saved digest; DataError if it differs."""
        if dict(state) != self.state:
            raise DataError(
                f"{self.name}: the resumed run had {state['rows']} rows, which are not the {self.state['rows']} given "
                "now. Pass the same rows, or start a new run from its hf_model."
            )


def chunks(rows: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Cut rows into what the tokenizer gets at once: the number of the first row of each part, and the part."""
    for start in range(0, len(rows), CHUNK):
        yield start, rows[start : start + CHUNK]


def cache_folder() -> Path | None:
    """Return the folder of prepared data; None if none is to be kept, or after a warning if it has no place."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    folder = Path(named or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return folder.expanduser() if named else folder.expanduser() / "trlx_like"
    except RuntimeError as error:  # the user of `~` has no home directory
        logger.warning(_NOT_KEPT, folder, error, VARIABLE)
        return None


def digest(tokenizer: PreTrainedTokenizerBase, *parts: Any) -> str | None:
    """Return a digest of a tokenizer and of JSON values, of which the last is a sequence of rows.

    None if the values are not JSON or the tokenizer has code of its own: equal digests would not mean equal data.
    """
    if not (tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers.")):
        return None
    template = str(tokenizer.chat_template)
    *options, rows = parts
    about = [
        FORMAT,
        [version(package) for package in ("transformers", "tokenizers")],
        type(tokenizer).__qualname__,
        tokenizer.backend_tokenizer.to_str(),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        tokenizer.truncation_side,
        tokenizer.split_special_tokens,  # not in the text of the backend
        template,
        date.today().isoformat() if "strftime_now" in template + repr(options) else None,
        options,
    ]
    total = hashlib.sha256()
    try:
        total.update(json.dumps(about).encode())
        if isinstance(rows, JsonLines):
            total.update(rows.digest())
        else:
            for _, part in chunks(rows):
                total.update(json.dumps(part).encode())
    except (TypeError, ValueError):
        return None
    return total.hexdigest()[:32]


def _watched(rows: Iterable[R], count: int, name: str) -> Iterator[R]:
    """Iterate over rows, and show how many are prepared: on a terminal by a bar, elsewhere by a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal and count >= FEWEST and logger.isEnabledFor(logging.INFO):  # the latter on one process
        yield from track(rows, name, count, console=console, transient=True)
        return
    said = time.monotonic()
    for number, row in enumerate(rows):
        yield row
        if number % CHUNK == 0 and time.monotonic() > said + SECONDS:
            said = time.monotonic()
            logger.info("%s: %s of %s rows are prepared.", name, f"{number:,}", f"{count:,}")


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    """Return the arrays of a file that is whole, mapped to memory; None if there is none."""
    for path in folder.glob(f"{key}-*.safetensors"):
        try:
            if sha256_of(path) == path.stem.partition("-")[2]:
                with suppress(OSError):  # the folder may be another's, or one that can only be read
                    os.utime(path)  # used now
                return {name: values.numpy() for name, values in load_file(path).items()}
            path.unlink()
            logger.warning("%s is damaged and was removed; the data is prepared again.", path)
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s); the data is prepared again.", path, error)
    return None


def _write(folder: Path, key: str, arrays: dict[str, Any]) -> bool:
    """Write arrays to a file, and remove the oldest files beyond `MOST_BYTES`. If that fails, warn and return False."""
    size = sum(values.nbytes for values in arrays.values())
    partial = folder / f".{key}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if size > MOST_BYTES or shutil.disk_usage(folder).free < 2 * size:
            logger.warning("%s: too little space to keep %.1f GiB of prepared data.", folder, size / 2**30)
            return False
        try:
            save_file(arrays, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.chmod(0o600)  # the data of one person, also in a folder of several
            partial.replace(folder / f"{key}-{sha256_of(partial)}.safetensors")
        finally:
            partial.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another process removes the same
            _prune(folder)
    except (OSError, SafetensorError) as error:
        logger.warning(_NOT_KEPT, folder, error, VARIABLE)
        return False
    return True


def _prune(folder: Path) -> None:
    """Remove the files that were not used for the longest time, and what killed processes have left."""
    yesterday = time.time() - 86_400
    for left in folder.glob(".*-*"):
        if left.stat().st_mtime < yesterday:
            left.unlink(missing_ok=True)
    files = sorted(folder.glob("*-*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Return the first half of a file's SHA-256, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
