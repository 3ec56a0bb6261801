"""What the frozen lower blocks of a model compute for a sample, kept with it for later passes over the same sample.

Given samples keep it for the whole run: in memory, or in a file where that is too much. Samples that a policy draws
keep it for their round. Checkpoints hold what is in memory and belongs to samples that they hold.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from trlx_like.data import RolloutStore
from trlx_like.data.columns import Column, ColumnRows, MadeRows, as_columns, batch_of, ranges
from trlx_like.data.experience import IDS, Experience
from trlx_like.data.flat import LazyRows
from trlx_like.models.dropout import evaluating, has_dropout
from trlx_like.trainers.context import Run

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Experience)

UNCACHED = "All blocks of the model run in every pass: %s."
OF_MEMORY = OF_DISK = 1 / 2
"""The parts of a machine's free memory, and of the free space of a disk, that kept states may take."""


def parts_by_length(run: Run, elements: Sequence[E]) -> Iterator[tuple[Tensor, E]]:
    """Yield the numbers [n] and the samples of micro-batches of similar lengths, on the device.

    Collective: every process makes as many turns as the one with most samples.

    Args:
        run: The run.
        elements: This process's samples.
    """
    order, size = np.argsort(_sizes(elements), kind="stable").tolist(), run.microbatch_size  # saves padding
    for start in range(0, run.world.max(math.ceil(len(order) / size)) * size, size):
        run.check_stop()
        if rows := order[start : start + size]:
            yield torch.tensor(rows), batch_of(type(elements[0]), elements, rows).to(run.device)


class Place(Enum):
    """Where the states of given samples are kept."""

    NOWHERE = "nowhere"
    MEMORY = "memory"
    FILE = "file"


class KeptStates:
    """The states of given samples, one vector a token.

    Args:
        rows: The samples.
        folder: Where the file is that the vectors are mapped from; None: they are in memory.
    """

    def __init__(self, rows: ColumnRows[Any], folder: Path | None) -> None:
        self.rows, self.folder = rows, folder
        named = {field.name: field.metadata.get("mask") for field in fields(rows.kind)}
        self.masks = {name: mask for name, mask in named.items() if mask is not None and name.endswith("_trunk")}
        self.columns: dict[str, Column] = {}

    def write(self, numbers: Tensor, part: Any, states: Tensor) -> None:
        """Keep the states of some samples.

        Args:
            numbers: The numbers of the samples. [n]
            part: The samples.
            states: What enters the lowest trained block, for their `completions`. [B, P + R, H]

        Raises:
            OSError: If the disk does not take the file, at the first call.
        """
        if not self.columns:
            self._make_room(states.shape[-1], states.dtype)
        part.keep(states)
        for name, mask in self.masks.items():
            column = self.columns[name].taken(numbers)
            assert column.lengths is not None
            column.values[ranges(column.starts, column.lengths)] = getattr(part, name)[getattr(part, mask)].cpu()
            setattr(part, name, None)

    def _make_room(self, width: int, dtype: torch.dtype) -> None:
        lengths = [held for mask in self.masks.values() if (held := self.rows.columns[mask].lengths) is not None]
        every = torch.stack(lengths)  # [fields, N]
        shape = int(every.sum()), width
        values = torch.empty(shape, dtype=dtype) if self.folder is None else mapped(self.folder, shape, dtype)
        starts = (every.flatten().cumsum(0) - every.flatten()).view_as(every)
        for name, begin, held in zip(self.masks, starts, every, strict=True):
            self.columns[name] = Column(values, begin, held, saved=self.folder is None)

    def beside(self, rows: ColumnRows[E]) -> ColumnRows[E]:
        """Return the samples with their states."""
        return ColumnRows(rows.kind, {**rows.columns, **self.columns})


def mapped(folder: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Make a tensor whose numbers are in a file without a name, which is gone when the process is.

    Args:
        folder: Where the file is.
        shape: The shape of the tensor.
        dtype: Its format.

    Raises:
        OSError: If the disk does not take it.
    """
    size = math.prod(shape) * dtype.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a page that finds no room later would end the process
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        held = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    return torch.from_numpy(held).view(dtype).view(shape)


class TrunkStates:
    """Keep the states that enter the lowest trained block of a model, where samples are read more than once.

    Args:
        run: The run.
        model: The policy or reward model, before the first update. From now on it starts from kept states where a batch
            has them.
        passes: How many times a sample is read, in a round or, if samples are given, in the run.
        offline: The samples are given and not sampled in rounds.
    """

    def __init__(self, run: Run, model: Any, passes: int, offline: bool) -> None:
        self.run, self.model, self.passes, self.offline = run, model, passes, offline
        self._places: dict[tuple[int, int, bool], Place] = {}  # of given samples, by number, bytes and use
        if not run.config.train.keep_trunk:
            return
        if passes < 2:
            reason = "each sample is learned from once" if offline else "each sample is learned from once a round"
        else:
            reason = "dropout is on" if has_dropout(model.lm) else model.add_trunk()
        if reason is not None:
            self.drop(reason)

    def drop(self, reason: str) -> None:
        """Run all blocks in every pass from now on, and say why if some are frozen."""
        self.model.trunk = None
        if self.model.num_layers_unfrozen >= 0 or self.run.config.model.peft_config is not None:
            self._say(logging.INFO, UNCACHED, reason)

    def _say(self, level: int, text: str, *given: Any) -> None:
        if self.run.world.main:
            logger.log(level, text, *given)

    def refill(self, store: RolloutStore[Any]) -> None:
        """Compute the states of given samples that came without from a checkpoint, or from other processes."""
        if not self.offline or self.model.trunk is None or not len(store):
            return
        if self.run.world.max(without_states(store.elements)) and self.place(store.elements, True) is not Place.NOWHERE:
            with self.run.backend.sampling():
                store.elements = self.fill(store.elements, whole=True)

    @torch.no_grad()
    def fill(self, elements: Sequence[Any], whole: bool) -> Sequence[Any]:
        """Compute the states of given samples once, if `place` finds room for them.

        Args:
            elements: This process's samples; every process calls it, if samples are given.
            whole: All processes have the same samples, of which each uses its part.

        Returns:
            The samples in their order, with the states if they are kept.
        """
        if self.model.trunk is None or not self.offline or not self.run.world.max(without_states(elements)):
            return elements  # samples of a round get theirs when they are scored
        place = self.place(elements, whole)
        if place is Place.NOWHERE or (place is Place.FILE and not whole and self.run.world.size > 1):
            return elements  # a file is of one process, which fills it as soon as it has the samples of all
        rows = as_columns(type(elements[0]), elements) if len(elements) else None
        kept = None if rows is None else KeptStates(rows, self.run.directory if place is Place.FILE else None)
        refused = ""
        with evaluating(self.model):
            for numbers, part in parts_by_length(self.run, elements if rows is None else rows):
                with self.run.forward("logprobs"):
                    states = self.model.trunk.states(part.completions().inputs())
                try:
                    if kept is not None and not refused:
                        kept.write(numbers, part, states)
                except OSError as error:
                    refused = f"the disk of train.checkpoint_dir takes no file ({error})"
        if self.run.world.max(bool(refused)):
            self.drop(refused or "the disk of another process takes no file")
            return elements
        return elements if rows is None or kept is None else kept.beside(rows)

    def place(self, elements: Sequence[Any], whole: bool, held_out: bool = False) -> Place:
        """Decide, once for some samples, where their states are kept, and say so. Every process calls it.

        Args:
            elements: As for `fill`.
            whole: As for `fill`.
            held_out: They are for evaluation, so that no file is made for them.
        """
        if self.model.trunk is None or not self.offline:
            return Place.NOWHERE
        train, world, lm = self.run.config.train, self.run.world, self.model.lm
        size = int(_sizes(elements).sum()) * lm.config.get_text_config().hidden_size * lm.dtype.itemsize
        sums = [len(elements), size] if whole else world.sum([len(elements), size])
        total, size = map(int, sums)  # of all processes, each of which will have all
        key = total, size, held_out
        if key in self._places or not total:
            return self._places.get(key, Place.NOWHERE)
        passes = min(self.passes, train.total_steps * train.batch_size / max(1, total))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # processes on this machine
        memory = psutil.virtual_memory().available
        disk = shutil.disk_usage(_existing(self.run.directory)).free
        fits = not world.max(here * size > OF_MEMORY * memory)
        # Each process computes what it keeps. Of its own share it is read in each pass, and of all samples in some.
        reads = passes if fits and not whole else passes / world.size
        sizes = [count / 2**30 for count in (here * size, memory, disk)]
        if reads <= 1:
            self._say(logging.INFO, UNCACHED, f"each process reads a sample {reads:.2g} times")
            place = Place.NOWHERE
        elif fits:
            said = "What the frozen blocks make of %d samples is kept in memory: %.3f of %.1f GiB that are free."
            self._say(logging.INFO, said, total, *sizes[:2])
            place = Place.MEMORY
        elif held_out:
            place = Place.NOWHERE
        elif not world.max(here * size > OF_DISK * disk):
            said = (
                "What the frozen blocks make of %d samples is kept in a file in train.checkpoint_dir: %.3f GiB, where "
                "memory has %.1f and the disk %.1f GiB free."
            )
            self._say(logging.INFO, said, total, *sizes)
            place = Place.FILE
        else:
            said = (
                "what the frozen ones make of %d samples would take %.1f GiB, and there are %.1f GiB free in memory "
                "and %.1f GiB on the disk of train.checkpoint_dir"
            )
            self._say(logging.WARNING, UNCACHED % said, total, *sizes)
            place = Place.NOWHERE
        self._places[key] = place
        return place


def without_states(elements: Sequence[Any]) -> bool:
    """Return whether samples have no kept states, or some of them have none."""
    if isinstance(elements, ColumnRows):
        return not any(name.endswith("_trunk") for name in elements.columns)
    if isinstance(elements, MadeRows):
        return True
    held = (vars(element) for element in elements)
    return any(all(of[name] is None for name in of if name.endswith("_trunk")) for of in held)


def _existing(folder: Path) -> Path:
    """Return the lowest folder of a path that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _sizes(elements: Sequence[Any]) -> np.ndarray:
    """Count the tokens of each sample. [N]"""
    if isinstance(elements, LazyRows):
        return elements.sizes()
    lengths = (sum(len(ids) for name in IDS if (ids := getattr(e, name, None)) is not None) for e in elements)
    return np.fromiter(lengths, np.int64, len(elements))
