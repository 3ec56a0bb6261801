"""The store, which holds experience between collecting and learning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch

from trlx_like.data.experience import Experience
from trlx_like.errors import CheckpointError

E = TypeVar("E", bound=Experience)


class RolloutStore(Generic[E]):
    """Hold the elements of one kind of experience, and batch them in a shuffled order.

    With several processes each holds its own share of the elements.

    Args:
        experience_class: The class of the elements.
    """

    def __init__(self, experience_class: type[E]) -> None:
        self.experience_class = experience_class
        self.elements: list[E] = []
        self.epoch = 0  # number of the pass, from 0, that the last batch of `batches` belongs to
        self.rows: list[int] = []  # numbers of the elements of that batch; none after the last

    def push(self, elements: Iterable[E]) -> None:
        """Add elements."""
        self.elements.extend(elements)

    def clear(self) -> None:
        """Remove all elements."""
        self.elements = []

    def __len__(self) -> int:
        return len(self.elements)

    def batches(self, batch_size: int, generator: torch.Generator, epochs: int = 1) -> Iterator[E]:
        """Iterate over the elements in shuffled batches.

        A batch is padded to its own longest element, not to the longest of the store. The last batch of a pass may be
        short.

        Args:
            batch_size: Elements per batch.
            generator: Draws the order of each pass.
            epochs: Passes over the elements.
        """
        for self.epoch in range(epochs):
            order = torch.randperm(len(self.elements), generator=generator).tolist()
            for start in range(0, len(order), batch_size):
                self.rows = order[start : start + batch_size]
                yield self.experience_class.collate([self.elements[row] for row in self.rows])
        self.rows = []

    def state_dict(self) -> dict[str, Any]:
        """Return all elements, each field as one flat tensor with the shapes of the elements."""
        columns: dict[str, Any] = {}
        for column in fields(self.experience_class) if self.elements else ():
            values = [getattr(element, column.name) for element in self.elements]
            if values[0] is not None:
                flat = torch.cat([value.reshape(-1) for value in values])
                shapes = torch.tensor([list(value.shape) for value in values], dtype=torch.int64)
                columns[column.name] = {"values": flat, "shapes": shapes}
        return {"count": len(self.elements), "columns": columns}

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
        columns: dict[str, list[Any]] = {}
        for column in fields(self.experience_class):
            saved = state["columns"].get(column.name)
            if saved is None:
                columns[column.name] = [None] * state["count"]
                continue
            shapes = [tuple(shape) for shape in saved["shapes"].tolist()]
            pieces = saved["values"].split([torch.Size(shape).numel() for shape in shapes])
            columns[column.name] = [p.reshape(s).clone() for p, s in zip(pieces, shapes, strict=True)]
        self.elements = [
            self.experience_class(**{name: values[row] for name, values in columns.items()})
            for row in range(state["count"])
        ]
