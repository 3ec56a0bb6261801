"""What a checkpoint was made with, and what of it has changed when a run is resumed."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from trlx_like.config import TRLConfig
from trlx_like.config.resume import Change, differences, record
from trlx_like.errors import CheckpointError

FILE = "made_with.json"
"""The name of the record in a checkpoint."""

PACKAGES = ("trlx-like", "torch", "transformers", "tokenizers", "accelerate", "peft", "diffusers")
OTHER_DATA = "the run would go on with other data"


def made_with(config: TRLConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what the weights of a run come from, as JSON values.

    Args:
        config: The complete configuration.
        given: The data and functions of the run, by the names of `train`'s arguments.

    Returns:
        The options, a digest of the rows of each data argument, one of the code of each function, and the versions of
        the packages. It is the same for the same run in another folder.
    """
    present = {name: value for name, value in given.items() if value is not None}
    rows = {name: value for name, value in present.items() if _is_data(value)}
    return {
        "config": record(config),
        "data": {name: rows_digest(value) for name, value in rows.items()},
        "code": {name: code_digest(value) for name, value in present.items() if name not in rows},
        "versions": versions(),
    }


def changes_since(checkpoint: Path, config: TRLConfig, now: Mapping[str, Any]) -> list[Change]:
    """Compare what a checkpoint was made with and what the run that resumes it has.

    Args:
        checkpoint: The folder of the checkpoint.
        config: The configuration of the run.
        now: What `made_with` returned for the run.

    Raises:
        CheckpointError: If the checkpoint has no such record.
    """
    try:
        before = json.loads((checkpoint / FILE).read_bytes())
        found = list(differences(config, before["config"]))
        for part, option, refused in (
            ("data", "{}", OTHER_DATA),
            ("code", "code of {}", None),
            ("versions", "version of {}", None),
        ):
            old, new = before[part], now[part]
            names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
            found += [Change(option.format(name), old.get(name), new.get(name), refused) for name in names]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint / FILE} cannot be read, so nothing can be compared: {error!r}.") from error
    return found


def checked(changes: list[Change], checkpoint: Path, force: bool) -> str:
    """Return the table of changes, for the log.

    Args:
        changes: What differs from the checkpoint.
        checkpoint: The folder of the checkpoint.
        force: Whether changes that are refused are made all the same.

    Raises:
        CheckpointError: If a change is refused.
    """
    refused = [change for change in changes if change.refused is not None]
    if refused and not force:
        raise CheckpointError(
            f"{checkpoint} was made with other options or data, of which {len(refused)} cannot change:\n"
            f"{table(changes)}\nSet them as they were, or train.force_resume (--force) to resume all the same."
        )
    return table(changes, force)


def table(changes: list[Change], force: bool = False) -> str:
    """Format changes in columns, one line each."""
    rows = [change.words(force) for change in changes]
    widths = [max(len(row[column]) for row in rows) for column in range(2)] if rows else []
    return "\n".join(f"  {option:<{widths[0]}}  {values:<{widths[1]}}  {verdict}" for option, values, verdict in rows)


def rows_digest(rows: Any) -> str:
    """Return a digest of rows of data. Of values that JSON does not know, the type counts."""
    total = hashlib.sha256()
    for row in rows.items() if isinstance(rows, Mapping) else rows:
        total.update(json.dumps(row, default=_described, skipkeys=True).encode() + b"\n")
    return f"{len(rows)} rows, {total.hexdigest()[:16]}"


def code_digest(function: Any) -> str:
    """Return the name of a function, or of an object's class, with a digest of the file that defines it.

    What is defined in this package has the name alone, as its version is recorded beside it.
    """
    if hasattr(function, "functions"):  # several weighted ones
        return "; ".join(map(code_digest, function.functions))
    function = getattr(function, "func", function)  # below a partial
    owner = inspect.unwrap(function) if hasattr(function, "__qualname__") else type(function)
    if str(owner.__module__).startswith("trlx_like."):
        return str(owner.__qualname__)
    try:
        source = Path(inspect.getsourcefile(owner) or "").read_bytes()
    except (OSError, TypeError):  # built in, or typed into a shell
        return str(owner.__qualname__)
    return f"{owner.__qualname__}, {hashlib.sha256(source).hexdigest()[:16]}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _is_data(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not callable(value)


def _described(value: Any) -> Any:
    """Stand for a value that JSON does not know: numbers of an array, or the type."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__
