"""Everything of a run that changes while it trains: what registers here is saved and restored."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trlx_like.checkpoint.tree import load_tree, save_tree
from trlx_like.errors import CheckpointError

FOLDER = "state"
INDEX = "index.json"
VERSION = 1


class Stateful(Protocol):
    """What can be saved: torch modules, optimisers, schedulers, and whatever else has these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class Fields:
    """Attributes of an object as state. Made by `fields`."""

    owner: Any
    names: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the attributes. A tensor goes to the device of the one it replaces."""
        if set(state) != set(self.names):
            raise ValueError(f"it has the fields {sorted(state)}, and {sorted(self.names)} are wanted")
        for name, value in state.items():
            present = getattr(self.owner, name)
            moved = isinstance(value, Tensor) and isinstance(present, Tensor)
            setattr(self.owner, name, value.to(present.device) if moved else value)


def fields(obj: Any, *names: str) -> Fields:
    """Plain attributes of an object (numbers, None, text, tensors, dicts and lists of them) as one item.

    Raises CheckpointError for an attribute that the object does not have yet.
    """
    missing = [name for name in names if not hasattr(obj, name)]
    if missing:
        raise CheckpointError(f"{type(obj).__name__} has no {', '.join(missing)} to save yet: set it first.")
    return Fields(obj, names)


@dataclass(frozen=True)
class Registered:
    """What `TrainState.register` was told."""

    item: Stateful
    local: bool
    small: bool


class TrainState:
    """The registered items by name, written as `state/shared/<name>` and `state/rank_<r>/<name>`.

    meta: who writes, for the reader of a message ({"trainer": "PPOTrainer"}). The folder given to `save` and
    `load` must be on a disk that all processes see.
    """

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        self.meta = dict(meta or {})
        self.items: dict[str, Registered] = {}

    def register(self, name: str, item: Stateful, *, local: bool = False, small: bool = True) -> None:
        """Saves `item` under a name from now on. Items are restored in the order of registration.

        local: every process has its own (random numbers, store); otherwise it is the same on all of them and
        rank 0 writes it. small: `snapshot` copies it. Raises CheckpointError for a name that is taken or no
        file name, and for an item without state_dict and load_state_dict.
        """
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise CheckpointError(f"{name!r} cannot be saved under this name: letters, digits, . _ - only.")
        if name in self.items:
            held = type(self.items[name].item).__name__
            raise CheckpointError(f"{name!r} is the name of a registered {held}; choose another.")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                kind = type(item).__name__
                raise CheckpointError(f"{name!r} is a {kind}, which has no {method}(): see fields().")
        self.items[name] = Registered(item, local, small)

    def snapshot(self) -> dict[str, Any]:
        """Copies of the small items' states, for `restore`."""
        small = {name: kept.item for name, kept in self.items.items() if kept.small}
        return {name: copy.deepcopy(item.state_dict()) for name, item in small.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Puts a snapshot back. The snapshot is used up: items may keep parts of it."""
        for name, state in snapshot.items():
            self.items[name].item.load_state_dict(state)

    def save(self, directory: Path, rank: int, main: bool) -> None:
        """Writes this process's part into a folder that exists. To be called by all of them.

        Every process asks every item for its state, so that items may talk to their twins in `state_dict`.
        """
        for name, kept in self.items.items():
            state = kept.item.state_dict()
            if kept.local or main:
                place = _place(directory, name, kept.local, rank)
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    save_tree(state, place)
                except CheckpointError as error:
                    raise CheckpointError(f"{name} cannot be saved: {error}") from error
        if main:
            index = {"version": VERSION, "meta": self.meta, "items": self._kinds()}
            (directory / FOLDER).mkdir(exist_ok=True)
            (directory / FOLDER / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def load(self, directory: Path, rank: int, ranks: int = 1) -> None:
        """Restores all items from a folder that `save` wrote. Nothing is touched if the folder does not fit.

        rank, ranks: which of how many processes this is. Raises CheckpointError for items that are missing or
        that nobody registered, for another number of processes, and for an item that does not take its state.
        """
        index = _read_index(directory)
        self._check(directory, index, ranks)
        for name, kept in self.items.items():
            state = load_tree(_place(directory, name, kept.local, rank))
            try:
                kept.item.load_state_dict(state)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                source = _written(directory, index)
                reason = " ".join(str(error).split())  # torch writes lists over several lines
                raise CheckpointError(f"{name} cannot be restored from {source}: {reason}") from error

    def _kinds(self) -> dict[str, str]:
        return {name: "local" if kept.local else "shared" for name, kept in self.items.items()}

    def _check(self, directory: Path, index: dict[str, Any], ranks: int) -> None:
        wanted, saved = self._kinds(), index["items"]
        problems = [f"it lacks {name}" for name in wanted if name not in saved]
        problems += [f"it has {name}, which this run does not" for name in saved if name not in wanted]
        problems += [
            f"{name} is {saved[name]} there and {kind} here"
            for name, kind in wanted.items()
            if saved.get(name, kind) != kind
        ]
        if problems:
            here = _described(self.meta) or "this run"
            raise CheckpointError(f"{_written(directory, index)} does not fit {here}: {'; '.join(problems)}.")
        local = [name for name, kind in wanted.items() if kind == "local"]
        written = len(list((directory / FOLDER).glob("rank_*")))
        if local and written != ranks:
            raise CheckpointError(
                f"{_written(directory, index)} has the state of {written} processes ({', '.join(local)}), and "
                f"this run has {ranks}. Start {written}, or give its weights to a new run (model.model_path)."
            )


def _place(directory: Path, name: str, local: bool, rank: int) -> Path:
    return directory / FOLDER / (f"rank_{rank}" if local else "shared") / name


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / FOLDER / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, items = index["version"], index["items"]
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {FOLDER}/{INDEX}: it is no checkpoint of a run.") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != VERSION or not isinstance(items, dict):
        raise CheckpointError(f"{path} has version {version!r}; this release reads version {VERSION}.")
    return index


def _written(directory: Path, index: dict[str, Any]) -> str:
    described = _described(index.get("meta"))
    return f"{directory}, written by {described}," if described else str(directory)


def _described(meta: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in meta.items()) if isinstance(meta, dict) else ""
