"""The store: experience between collecting and learning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch

from trlx_like.data.experience import Experience

E = TypeVar("E", bound=Experience)


class RolloutStore(Generic[E]):
    """Elements of one kind of experience, batched in a shuffled order.

    With several processes each holds its own share of the elements.
    """

    def __init__(self, experience_class: type[E]) -> None:
        self.experience_class = experience_class
        self.elements: list[E] = []

    def push(self, elements: Iterable[E]) -> None:
        self.elements.extend(elements)

    def clear(self) -> None:
        self.elements = []

    def __len__(self) -> int:
        return len(self.elements)

    def batches(self, batch_size: int, generator: torch.Generator, epochs: int = 1) -> Iterator[E]:
        """`epochs` passes, each in a new order drawn from `generator`. The last batch of a pass may be short.

        A batch is padded to its own longest element, not to the longest of the store.
        """
        for _ in range(epochs):
            order = torch.randperm(len(self.elements), generator=generator).tolist()
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                yield self.experience_class.collate([self.elements[row] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """All elements, each field as one flat tensor and the shapes to cut it by."""
        columns: dict[str, Any] = {}
        for column in fields(self.experience_class) if self.elements else ():
            values = [getattr(element, column.name) for element in self.elements]
            if values[0] is not None:
                flat = torch.cat([value.reshape(-1) for value in values])
                shapes = torch.tensor([list(value.shape) for value in values], dtype=torch.int64)
                columns[column.name] = {"values": flat, "shapes": shapes}
        return {"count": len(self.elements), "columns": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
