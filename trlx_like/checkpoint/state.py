"""Registers everything that changes while a run trains, and saves and restores it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trlx_like.checkpoint.ranges import has_parts
from trlx_like.checkpoint.tree import load_tree, save_tree, tree_bytes
from trlx_like.errors import CheckpointError, raised_as

FOLDER = "state"
INDEX = "index.json"
VERSION = 2


class Stateful(Protocol):
    """Define the interface of items to register. Torch modules, optimizers and schedulers have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as a tree that `save_tree` can write."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore what `state_dict` returned."""


class Fields:
    """Wrap plain attributes of an object as one item for `TrainState.register`.

    Args:
        owner: The object.
        names: Its attributes: numbers, None, text, tensors, and dicts and lists of them.

    Raises:
        CheckpointError: For an attribute that the object does not have yet.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner, self.names = owner, names
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise CheckpointError(f"{type(owner).__name__} has no {', '.join(missing)} to save yet: set it first.")

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes. A tensor is moved to the device of the one that it replaces.

        Args:
            state: The attributes by name.

        Raises:
            ValueError: If it has other names.
        """
        if set(state) != set(self.names):
            raise ValueError(f"it has the fields {sorted(state)}, and {sorted(self.names)} are wanted")
        for name, value in state.items():
            present = getattr(self.owner, name)
            moved = isinstance(value, Tensor) and isinstance(present, Tensor)
            setattr(self.owner, name, value.to(present.device) if moved else value)


fields = Fields


@dataclass(frozen=True)
class Registered:
    """Hold an item and the options that it was registered with."""

    item: Stateful
    local: bool
    small: bool
    renew: Callable[[], None] | None = None


class TrainState:
    """Save and restore the state of a run: items registered by name.

    Their files are `state/shared/<name>` and `state/rank_<r>/<name>`. Of a shared item whose state has `Part`s every
    process writes its own.

    Args:
        meta: Who writes the state, such as {"trainer": "PPOTrainer"}; it is shown in error messages.
    """

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        self.meta = dict(meta or {})
        self.items: dict[str, Registered] = {}
        self.sizes: dict[str, int] = {}  # bytes of each item, as this process last saved it

    def register(
        self,
        name: str,
        item: Stateful,
        *,
        local: bool = False,
        small: bool = True,
        renew: Callable[[], None] | None = None,
    ) -> None:
        """Register an item, which is then saved under a name. Items are restored in the order of registration.

        Args:
            name: Its name in the checkpoint: letters, digits, `.`, `_` and `-`.
            item: Anything with `state_dict` and `load_state_dict`.
            local: Whether each process has a state of its own, such as random numbers. Otherwise the state is the same
                on all processes, and rank 0 writes it.
            small: Whether `snapshot` copies it, and `save` writes it even if large items are left out.
            renew: For a local item: makes its state anew, if the checkpoint was written by another number of processes.
                It is called in the order of registration. None refuses such a checkpoint.

        Raises:
            CheckpointError: If the name is taken or invalid, or the item lacks one of the two methods.
        """
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise CheckpointError(f"{name!r} cannot be saved under this name: use only letters, digits, . _ -.")
        if name in self.items:
            held = type(self.items[name].item).__name__
            raise CheckpointError(f"{name!r} is the name of a registered {held}; choose another.")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                kind = type(item).__name__
                raise CheckpointError(f"{name!r} is a {kind}, which has no {method}(): see fields().")
        self.items[name] = Registered(item, local, small, renew)

    def snapshot(self) -> dict[str, Any]:
        """Copy the states of the small items.

        Returns:
            The states by name, for `restore`.
        """
        small = {name: kept.item for name, kept in self.items.items() if kept.small}
        return {name: copy.deepcopy(item.state_dict()) for name, item in small.items()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot. It can be used once, as items may keep parts of it.

        Args:
            snapshot: What `snapshot` returned.
        """
        for name, state in snapshot.items():
            self.items[name].item.load_state_dict(state)

    def save(self, directory: Path, rank: int, main: bool, *, large: bool = True) -> None:
        """Write this process's part of the state. All processes must call it.

        Every process calls `state_dict` of every item that is written, so that an item may communicate with other ranks
        in it.

        Args:
            directory: An existing folder, on a disk that all processes share.
            rank: The rank of this process.
            main: True on the process that writes the shared items.
            large: Whether to write the large items. Without them the caller puts their files there, see `is_large`.

        Raises:
            CheckpointError: If an item cannot be saved, with its name.
        """
        written = {name: kept for name, kept in self.items.items() if large or kept.small}
        states = {name: kept.item.state_dict() for name, kept in written.items()}
        self.sizes |= {name: tree_bytes(state) for name, state in states.items()}
        for name, kept in written.items():
            state = states.pop(name)
            if kept.local or main or has_parts(state):
                place = _place(directory, name, kept.local, rank)
                place.parent.mkdir(parents=True, exist_ok=True)
                with raised_as(CheckpointError, CheckpointError, f"{name} cannot be saved"):
                    save_tree(state, place, rank, main=kept.local or main)
        if main:
            index = {"version": VERSION, "meta": self.meta, "items": self._kinds()}
            (directory / FOLDER).mkdir(exist_ok=True)
            (directory / FOLDER / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def is_large(self, file: str) -> bool:
        """Return whether a file of a checkpoint, such as "state/shared/model.json", is of an item that is not small."""
        folder, _, name = file.rpartition("/")
        ends = (".json", ".safetensors", ".rank_")
        large = [item for item, kept in self.items.items() if not kept.small]
        return folder == f"{FOLDER}/shared" and any(name.startswith(f"{item}{end}") for item in large for end in ends)

    def load(self, directory: Path, rank: int, ranks: int = 1, skip: Collection[str] = ()) -> None:
        """Restore all items from a folder that `save` wrote. If the folder does not fit, nothing is changed.

        Args:
            directory: The folder.
            rank: The rank of this process.
            ranks: The number of processes.
            skip: Items that are left as they are.

        Raises:
            CheckpointError: If items are missing there or not registered here, if an item does not accept its state,
                or if the number of processes differs and a local item cannot be made anew.
        """
        index = _read_index(directory)
        written = len(list((directory / FOLDER).glob("rank_*")))
        self._check(directory, index, written, ranks)
        for name, kept in self.items.items():
            if name in skip:
                continue
            if kept.local and written != ranks:
                assert kept.renew is not None
                kept.renew()
                continue
            # Of an item that is divided over processes, each process reads its own part.
            parts = getattr(kept.item, "reads_parts", False)
            state = load_tree(_place(directory, name, kept.local, rank), parts=parts)
            try:
                kept.item.load_state_dict(state)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                source = _written(directory, index)
                reason = " ".join(str(error).split())  # torch's messages have several lines
                raise CheckpointError(f"{name} cannot be restored from {source}: {reason}") from error

    def _kinds(self) -> dict[str, str]:
        """Return for each item whether it is "local" or "shared"."""
        return {name: "local" if kept.local else "shared" for name, kept in self.items.items()}

    def _check(self, directory: Path, index: dict[str, Any], written: int, ranks: int) -> None:
        """Raise CheckpointError unless the saved items are those of this run, and fit its number of processes."""
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
        local = [name for name, kept in self.items.items() if kept.local and kept.renew is None]
        if local and written != ranks:
            raise CheckpointError(
                f"{_written(directory, index)} has the state of {written} processes ({', '.join(local)}), and "
                f"this run has {ranks}. Start {written}, or begin a new run from its weights (model.model_path)."
            )


def _place(directory: Path, name: str, local: bool, rank: int) -> Path:
    """Return the path of an item in a checkpoint."""
    return directory / FOLDER / (f"rank_{rank}" if local else "shared") / name


def _read_index(directory: Path) -> dict[str, Any]:
    """Read the list of saved items, or raise CheckpointError if it is missing or damaged."""
    path = directory / FOLDER / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, items = index["version"], index["items"]
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {FOLDER}/{INDEX}: it is no checkpoint of a run.") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != VERSION or not isinstance(items, dict):
        weights = directory / "hf_model"
        raise CheckpointError(
            f"{path} has version {version!r}; this release reads version {VERSION}. Resume with the release that wrote "
            f"it, or begin a new run from its weights (model.model_path: {weights})."
        )
    return index


def _written(directory: Path, index: dict[str, Any]) -> str:
    """Return the words for a checkpoint and who wrote it."""
    described = _described(index.get("meta"))
    return f"{directory}, written by {described}," if described else str(directory)


def _described(meta: Any) -> str:
    """Return the metadata of a state as words."""
    return ", ".join(f"{key} {value}" for key, value in meta.items()) if isinstance(meta, dict) else ""
