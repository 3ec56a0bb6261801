"""The base of experience: one dataclass is both an element in the store and a batch in a loss.

A field of `T` entries is `[T]` in an element and `[B, T]` in a batch, padded on the side that the field declares.
Which entries are real is never guessed from their values: every padded field names its boolean mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(
    side: Literal["left", "right"] = "right",
    value: float = 0,
    *,
    mask: str = "mask",
    default: Any = MISSING,
    kw_only: bool = False,
) -> Any:
    """Declare a field whose length differs between elements.

    Args:
        side: The side on which a batch pads the field.
        value: The value to pad with.
        mask: The boolean field that is True where this field is real. A mask names itself. A field of integers works as
            well: the sum of a row is then the length of this field.
        default: As in `dataclasses.field`; `None` makes the field optional.
        kw_only: As in `dataclasses.field`.
    """
    return field(default=default, kw_only=kw_only, metadata={"side": side, "value": value, "mask": mask})


def padded_rows(rows: list[Tensor], value: float = 0, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return rows as a batch [B, T] that is padded with a value on a side, and its mask [B, T] bool."""
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return pad_sequence(rows, True, value, side), pad_sequence(masks, True, False, side)


IDS = ("prompt", "response", "chosen", "rejected", "other")
"""Fields of whole numbers that hold token ids."""


@dataclass
class Experience:
    """Hold experience; algorithms derive from this class.

    Every field is a tensor, either `padded(...)` or of one shape in all elements.
    """

    place: Tensor | None = field(default=None, kw_only=True)
    """[B] int64: the number of the sample in its round, which orders the samples of all processes; None: not known."""

    @classmethod
    def collate(cls, elements: Sequence[Self]) -> Self:
        """Pad and stack elements to a batch. A field that is None in the elements is None in the batch."""
        columns: dict[str, Tensor | None] = {}
        for column in fields(cls):
            values = [getattr(element, column.name) for element in elements]
            if values[0] is None:
                columns[column.name] = None
            elif "side" in column.metadata:
                side, value = column.metadata["side"], column.metadata["value"]
                columns[column.name] = pad_sequence(values, True, value, padding_side=side)
            else:
                columns[column.name] = torch.stack(values)
        return cls(**columns)

    @classmethod
    def filled(cls, rows: int, prompt: int, other: int) -> Self:
        """Make a batch without padding, to see what samples of these lengths need: ids 1, masks True, all else zero.

        A field that is None by default stays None, unless its metadata has the `shape` of a row.

        Args:
            rows: Rows of the batch.
            prompt: Length of the fields that go by `prompt_mask`.
            other: Length of the other padded fields.
        """
        columns: dict[str, Tensor | None] = {}
        for column in fields(cls):
            shape, value = column.metadata.get("shape", ()), column.metadata.get("value")
            if "side" in column.metadata:
                shape = (prompt if column.metadata["mask"] == "prompt_mask" else other,)
            if column.default is None and "shape" not in column.metadata:
                columns[column.name] = None
            elif isinstance(value, bool):
                columns[column.name] = torch.ones(rows, *shape, dtype=torch.bool)
            elif column.name in IDS:
                columns[column.name] = torch.ones(rows, *shape, dtype=torch.int64)
            else:
                columns[column.name] = torch.zeros(rows, *shape)
        return cls(**columns)

    def split(self) -> list[Self]:
        """Split a batch into its elements, without their padding. The inverse of `collate`."""
        parts: dict[str, Sequence[Tensor]] = {}
        missing: dict[str, None] = {}
        for column in fields(self):
            if (value := getattr(self, column.name)) is None:
                missing[column.name] = None
                continue
            if "side" not in column.metadata:
                parts[column.name] = torch.ops.aten.unbind_copy(value)
                continue
            lengths = getattr(self, column.metadata["mask"]).sum(dim=1)
            place = torch.arange(value.shape[1], device=value.device)
            real = (place if column.metadata["side"] == "right" else place.flip(0)) < lengths[:, None]
            parts[column.name] = torch.ops.aten.split_with_sizes_copy(value[real], lengths.tolist())
        rows = zip(*parts.values(), strict=True)
        return [type(self)(**missing, **dict(zip(parts, row, strict=True))) for row in rows]

    def describe(self, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """Describe each row for a person: token ids as text, and numbers by their sum, minimum and maximum.

        Args:
            decode: Converts token ids to text.

        Returns:
            For each row the fields by name. Fields of truth values and of other whole numbers are left out.
        """
        return [
            {
                column.name: _described(value, decode)
                for column in fields(self)
                if (value := getattr(row, column.name)) is not None
                and not column.name.endswith("_trunk")
                and (value.is_floating_point() or column.name in IDS or value.dtype == torch.uint8)
            }
            for row in self.split()
        ]

    def lengths(self) -> Tensor:
        """Count the real entries of each row of a batch, over all its masks. [B]"""
        masks = dict.fromkeys(c.metadata["mask"] for c in fields(self) if "mask" in c.metadata)
        found = [held for mask in masks if (held := getattr(self, mask)) is not None and held.dtype == torch.bool]
        return torch.stack([held.sum(dim=1) for held in found]).sum(dim=0)

    def trim(self) -> Self:
        """Return the batch without the columns that are padding in every row."""
        cut: dict[str, Tensor] = {}
        for column in fields(self):
            batch = getattr(self, column.name)
            if batch is not None and "side" in column.metadata:
                longest = int(getattr(self, column.metadata["mask"]).sum(dim=1).max())
                start = batch.shape[1] - longest if column.metadata["side"] == "left" else 0
                cut[column.name] = batch.narrow(1, start, longest)
        return replace(self, **cut)

    def microbatches(self, size: int | None) -> Iterator[tuple[Tensor, Self]]:
        """Cut a batch into parts of at most `size` rows of similar length, shortest first, to save padding.

        Args:
            size: rows of a part; None: the whole batch is one part.

        Yields:
            The numbers of a part's rows in this batch [n], and the part, without columns that are padding in all of it.
        """
        if size is None or size >= len(self):
            yield torch.arange(len(self)), self
            return
        order = self.lengths().argsort(stable=True)
        for start in range(0, len(self), size):
            rows = order[start : start + size]
            yield rows, self[rows].trim()

    def __len__(self) -> int:
        """Return the number of rows of a batch."""
        return len(next(value for value in vars(self).values() if value is not None))

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Self:
        """Return a batch of the chosen rows."""
        return self._map(lambda value: value[rows])

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on a device."""
        return self._map(lambda value: value.to(device))

    def _map(self, function: Any) -> Self:
        return replace(self, **{name: function(value) for name, value in vars(self).items() if value is not None})


def _described(value: Tensor, decode: Callable[[list[int]], str]) -> Any:
    """Describe one field of an element: as text, as a number, or as a summary of several numbers."""
    if value.dtype == torch.uint8:
        return bytes(value.tolist()).decode("utf-8", "replace")
    if not value.is_floating_point():
        return decode(value.tolist())
    if value.numel() < 2:
        return value.sum().item()
    return {"sum": value.sum().item(), "min": value.min().item(), "max": value.max().item()}
