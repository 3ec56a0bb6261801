"""The store, which holds experience between collecting and learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trlx_like.data.columns import ColumnRows, batch_of, packed
from trlx_like.data.experience import Experience
from trlx_like.data.flat import LazyRows
from trlx_like.errors import CheckpointError

E = TypeVar("E", bound=Experience)

WINDOW = 100
"""Batches that share a window when elements are sorted by length; with 50, as in transformers, more padding is left."""


class RolloutStore(Generic[E]):
    """Hold the elements of one kind of experience, and batch them in a shuffled order.

    With several processes each pushes its own share, and `join` gives all elements to all of them, in the order that
    one process would have. The order of batches is then one permutation of all elements, so that the run does not
    depend on the number of processes. Every process holds the experience of the whole round, and exchanges it once.

    Args:
        experience_class: The class of the elements.
    """

    def __init__(self, experience_class: type[E]) -> None:
        self.experience_class = experience_class
        self.elements: Sequence[E] = []
        self.joined = 0  # how many of the first elements are the same on all processes
        self.epoch = 0  # number of the pass, from 0, that the last batch of `batches` belongs to
        self.rows: list[int] = []  # numbers of the elements of the whole global batch; none after the last

    def push(self, elements: Iterable[E], *, whole: bool = False) -> None:
        """Add elements.

        Args:
            elements: The elements.
            whole: True: every process adds all of them, in the same order. False: each adds its own share. Rows that
                are made when they are read stay so, as long as nothing else is in the store.
        """
        if isinstance(elements, LazyRows) and not self.elements:
            self.elements = elements
        else:
            self.elements = [*self.elements, *elements]
        if whole:
            self.joined = len(self.elements)

    def join(self, gather: Callable[[list[Any]], list[Any]], ranks: int) -> None:
        """Give the elements that each process has pushed since the last call to all processes, which all call it.

        They are sorted by `place`. Elements without one are taken from the processes in turn, as they were dealt out.

        Args:
            gather: Returns the items of all processes, in the order of ranks.
            ranks: The number of processes.
        """
        if isinstance(self.elements, LazyRows) and (self.joined or ranks == 1):
            self.joined = len(self.elements)
            return  # they are whole on all processes
        new: Sequence[E] = self.elements[self.joined :]
        if ranks > 1:
            shares = gather([packed(self.experience_class, new)])
            new = _dealt(self.experience_class, shares) if any(share["count"] for share in shares) else []
        else:
            places = [int(element.place) for element in new if element.place is not None]
            if len(places) == len(new):
                new = [new[row] for row in sorted(range(len(new)), key=places.__getitem__)]
        self.elements = [*self.elements[: self.joined], *new] if self.joined else new
        self.joined = len(self.elements)

    def clear(self) -> None:
        """Remove all elements."""
        self.elements, self.joined = [], 0

    def __len__(self) -> int:
        return len(self.elements)

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator,
        epochs: int = 1,
        *,
        rank: int = 0,
        ranks: int = 1,
        skip: int = 0,
        by_length: bool = False,
    ) -> Iterator[E | None]:
        """Iterate over this process's parts of the shuffled global batches.

        A batch is padded to its own longest element, not to the longest of the store. The last batch of a pass may be
        short.

        Args:
            batch_size: Elements per global batch.
            generator: Draws the order of each pass; it must be in the same state on all processes.
            epochs: Passes over the elements.
            rank: The number of this process. It gets each `ranks`-th element of a batch, from this one on.
            ranks: The number of processes.
            skip: How many batches to leave out at the beginning, without making them.
            by_length: Whether a batch has elements of similar lengths, see `similar_lengths`.

        Yields:
            A batch; None if this process has no part of it.
        """
        for self.epoch in range(epochs):
            order = torch.randperm(len(self.elements), generator=generator)
            if by_length:
                order = similar_lengths(order, self.sizes(), batch_size, generator)
            for start in range(0, len(order), batch_size):
                if skip > 0:
                    skip -= 1
                    continue
                self.rows = order[start : start + batch_size].tolist()
                own = self.rows[rank::ranks]
                yield batch_of(self.experience_class, self.elements, own) if own else None
        self.rows = []

    def sizes(self) -> Tensor:
        """Count the tokens of each element. [N]"""
        if isinstance(self.elements, LazyRows):
            return torch.from_numpy(self.elements.sizes())
        masks = {column.metadata["mask"] for column in fields(self.experience_class) if "mask" in column.metadata}
        held = ([getattr(element, mask) for mask in masks] for element in self.elements)
        return torch.tensor([sum(len(m) for m in of if m is not None and m.dtype == torch.bool) for of in held])

    def state_dict(self) -> dict[str, Any]:
        """Return all elements, each field as one flat tensor with the shapes of the elements."""
        return packed(self.experience_class, self.elements)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the elements by those that were saved.

        Raises:
            CheckpointError: If the checkpoint has fields that this kind of experience does not have, or lacks one that
                is never None.
        """
        known = {column.name for column in fields(self.experience_class)}
        if unknown := sorted(set(state["columns"]) - known):
            raise CheckpointError(
                f"the checkpoint's store has {', '.join(unknown)}, which {self.experience_class.__name__} does not "
                f"have; its fields are {', '.join(sorted(known))}."
            )
        needed = [column.name for column in fields(self.experience_class) if "None" not in str(column.type)]
        if state["count"] and (missing := [name for name in needed if name not in state["columns"]]):
            raise CheckpointError(
                f"the checkpoint's store lacks {', '.join(missing)}, which every {self.experience_class.__name__} has."
            )
        self.elements = ColumnRows.unpacked(self.experience_class, state) if state["count"] else []
        self.joined = len(self.elements)


def _dealt(kind: type[E], shares: Sequence[dict[str, Any]]) -> ColumnRows[E]:
    """Return the elements of all processes: by their place or, without one, one of each process in turn."""
    every = ColumnRows.unpacked(kind, *shares)
    if "place" in every.columns:
        order = every.columns["place"].batch()
    else:  # the number of each element in its share, and among those with the same number that of the process
        order = torch.cat([torch.arange(share["count"]) for share in shares])
    return every.taken(order.argsort(stable=True))


def similar_lengths(order: Tensor, sizes: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Sort an order by length within windows of `WINDOW` batches, and put the batches of a window in a random order.

    Args:
        order: The numbers of elements in a random order. [N]
        sizes: The length of each element. [N]
        batch_size: Elements per batch.
        generator: Draws the order of batches.

    Returns:
        The numbers in the new order. The last of them stay last if they do not fill a batch. [N]
    """
    whole = len(order) - len(order) % batch_size
    found = []
    for window in order[:whole].split(WINDOW * batch_size):
        batches = window[sizes[window].argsort(stable=True)].view(-1, batch_size)
        found.append(batches[torch.randperm(len(batches), generator=generator)].view(-1))
    return torch.cat([*found, order[whole:]])
