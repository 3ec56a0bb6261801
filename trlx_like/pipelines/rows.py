"""Helpers for all kinds of data: checks of lists of rows, and prompts that come with further keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeGuard

from trlx_like.errors import DataError
from trlx_like.pipelines.lines import JsonLines
from trlx_like.reading import unwritable

Message = Mapping[str, Any]


@dataclass
class PromptColumns:
    """Hold a batch of prompts: base of dataclasses whose fields are lists with one entry per prompt.

    Attributes:
        numbers: The number of each sample among all samples of its round or evaluation, over all processes. A sample's
            random numbers follow from it. By default 0, 1, ...
    """

    numbers: list[int] = field(default_factory=list, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if not self.numbers:
            self.numbers = list(range(len(self)))

    def __len__(self) -> int:
        return len(next(column for name, column in vars(self).items() if name != "numbers"))

    def __getitem__(self, rows: slice | Sequence[int]) -> Self:
        """Return a batch of the chosen rows."""
        places = range(len(self))[rows] if isinstance(rows, slice) else rows
        return type(self)(**{name: [column[row] for row in places] for name, column in vars(self).items()})

    def __add__(self, other: Self) -> Self:
        """Return a batch of these rows and those of another batch."""
        return type(self)(**{name: column + getattr(other, name) for name, column in vars(self).items()})

    def repeated(self, times: int) -> Self:
        """Return a batch with each row `times` times in succession, each a sample of its own."""
        rows = self[[row for row in range(len(self)) for _ in range(times)]]
        return rows.numbered([number * times + again for number in self.numbers for again in range(times)])

    def numbered(self, numbers: Sequence[int]) -> Self:
        """Return the batch with other numbers of its samples."""
        return replace(self, numbers=list(numbers))


def is_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    """Tell whether a value is meant as messages: a list that is not empty and begins with a mapping."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


LONGEST_TEXT = 10_000_000
"""Most characters of a text in a row. Tokenizers need minutes, and no model has a use, for more."""


def unusable_text(value: Any) -> str | None:
    """Return why a tokenizer could not encode a text in a row: it is too long, or not text. None if all can be."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"a text has {len(value):,} characters; at most {LONGEST_TEXT:,} are read"
        return unwritable(value)
    parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    return next(filter(None, map(unusable_text, parts)), None) if isinstance(parts, list | tuple) else None


def row_list(rows: Any, name: str) -> Sequence[Any]:
    """Return rows as a list or lines of a file. Raise DataError for text or a dict in their place, and for no rows."""
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        kind = "string" if isinstance(rows, str) else type(rows).__name__
        raise DataError(f"{name} is a {kind}; give a list of rows.")
    if not (listed := rows if isinstance(rows, JsonLines) else list(rows)):
        raise DataError(f"{name} is empty; give at least one.")
    return listed


def checked_rows(rows: Any, name: str, first: int = 0) -> Sequence[Any]:
    """Return rows as `row_list` does. Raise DataError for unusable text, too.

    Args:
        rows: The rows.
        name: Their name in errors.
        first: The number of the first one in errors.
    """
    listed = row_list(rows, name)
    for number, row in enumerate(listed, first):
        if why := unusable_text(row):
            raise DataError(f"{name}[{number}]: {why}.")
    return listed


def named_sets(rows: Any, argument: str) -> list[tuple[str, str, Any]]:
    """Return the name of each held-out set, its name in errors, and its rows.

    Args:
        rows: A mapping from names to rows; or the rows of one set, whose name is ""; or None for no set.
        argument: The name of the argument that has the rows.

    Raises:
        DataError: If the mapping is empty.
    """
    if not isinstance(rows, Mapping):
        return [] if rows is None else [("", argument, rows)]
    if not rows:
        raise DataError(f"{argument} is an empty dict; give rows, or a dict from names to rows.")
    return [(str(name), f"{argument}[{str(name)!r}]", part) for name, part in rows.items()]


def joined_sets(rows: Any) -> tuple[Any, list[str]]:
    """Join several evaluation sets, which are given by name, into one.

    Args:
        rows: The rows of one set, or a mapping from the name of each set to its rows.

    Returns:
        The rows of all sets, and the name of the set that each row is in; no names if there is one set only.

    Raises:
        DataError: If there is no set, or one of them is empty or is no list.
    """
    if not isinstance(rows, Mapping):
        return rows, []
    sets = {str(name): checked_rows(part, f"eval_prompts[{name!r}]") for name, part in rows.items()}
    joined = [row for part in sets.values() for row in part]
    return joined, [name for name, part in sets.items() for _ in part]
