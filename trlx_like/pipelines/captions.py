"""Prompts for images, from a list or from a function, with the further keys that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from trlx_like.errors import DataError
from trlx_like.pipelines.forms import split_prompt
from trlx_like.pipelines.rows import PromptColumns, checked_rows

RESERVED = ("images", "prompts")
"""Keys that a prompt may not have, since reward functions are called with these keywords already."""
NEGATIVE = "negative_prompt"
"""The key of a prompt that replaces `method.negative_prompt` for its images."""


@dataclass
class Captions(PromptColumns):
    """A batch of prompts for images, with the further keys of each prompt."""

    texts: list[str]
    metadata: list[dict[str, Any]]

    @classmethod
    def of(cls, rows: Sequence[Any], place: Callable[[int], str]) -> Captions:
        """Read rows that are strings, or dicts with a string under "prompt"; `place` names a row in errors."""
        read = [split_prompt(row, place(number), RESERVED, chat=False) for number, row in enumerate(rows)]
        for number, (_, metadata) in enumerate(read):
            if not isinstance(metadata.get(NEGATIVE, ""), str):
                raise DataError(f"{place(number)}: {NEGATIVE!r} must be a string.")
        return cls([text for text, _ in read], [metadata for _, metadata in read])


def read_captions(prompts: Sequence[Any]) -> Captions:
    """Read prompts that are strings, or dicts with a string under "prompt" and further keys.

    Raises:
        DataError: A row has another form. The error names it.
    """
    return Captions.of(checked_rows(prompts, "prompts"), "prompts[{}]".format)


class CaptionFunction:
    """Draw prompts from a function that makes one per call.

    Each call draws its own random numbers, which are the same on every process and in a resumed run.

    Args:
        function: Called without arguments; returns a string, or a dict with a string under "prompt" and further keys.
        seeded: Seeds all generators by the number of a call, for the duration of a `with` block.
    """

    def __init__(self, function: Callable[[], Any], seeded: Callable[[int], AbstractContextManager[None]]) -> None:
        self.function = function
        self.seeded = seeded
        self.calls = 0
        self.taken: list[tuple[int, int]] = []  # 0 and the number of the call, of each prompt of the last `take`
        self.rows = None  # the prompts have no end

    def take(self, count: int) -> Captions:
        """Return the next `count` prompts."""
        made = []
        for call in range(self.calls, self.calls + count):
            with self.seeded(call):
                made.append(self.function())
        captions = Captions.of(made, lambda row: f"call {self.calls + row} of prompts")
        self.taken = [(0, self.calls + row) for row in range(count)]
        self.calls += count
        return captions

    def state_dict(self) -> dict[str, int]:
        """Return the number of calls so far."""
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the number of calls made, from which the next call continues."""
        self.calls = state["calls"]
