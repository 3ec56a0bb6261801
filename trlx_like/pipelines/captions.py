"""Prompts for images: text and what else the user gave with it, from a list or from a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_like.errors import DataError

RESERVED = ("images", "prompts")
"""Keys that a prompt may not have: reward functions are called with these keywords already."""
NEGATIVE = "negative_prompt"
"""Key of a prompt whose images are led away from another text than `method.negative_prompt`."""


@dataclass
class Captions:
    """Prompts for images."""

    texts: list[str]
    metadata: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice | Sequence[int]) -> Captions:
        if isinstance(rows, slice):
            return Captions(self.texts[rows], self.metadata[rows])
        return Captions([self.texts[row] for row in rows], [self.metadata[row] for row in rows])

    def __add__(self, other: Captions) -> Captions:
        return Captions(self.texts + other.texts, self.metadata + other.metadata)

    def repeated(self, times: int) -> Captions:
        """Each prompt `times` times, one after the other."""
        return self[[row for row in range(len(self)) for _ in range(times)]]


def read_captions(prompts: Sequence[Any]) -> Captions:
    """Prompts that are strings, or dicts with one under "prompt" and metadata. DataError names the row of others."""
    if isinstance(prompts, str):
        raise DataError("prompts is a string; give a list of them.")
    rows = [_read(prompt, f"prompts[{row}]") for row, prompt in enumerate(prompts)]
    if not rows:
        raise DataError("prompts is empty; give at least one.")
    return Captions([text for text, _ in rows], [metadata for _, metadata in rows])


class CaptionFunction:
    """Prompts that a function makes up, one a call. What it draws from Python's `random` goes on after a resume."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.calls = 0

    def take(self, count: int) -> Captions:
        """The next `count` prompts."""
        made = [_read(self.function(), f"call {self.calls + row} of prompts") for row in range(count)]
        self.calls += count
        return Captions([text for text, _ in made], [metadata for _, metadata in made])

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.calls = state["calls"]


def _read(prompt: Any, place: str) -> tuple[str, dict[str, Any]]:
    if isinstance(prompt, str):
        return prompt, {}
    if not isinstance(prompt, Mapping):
        raise DataError(f"{place} is a {type(prompt).__name__}; give a string, or a dict with 'prompt'.")
    if not isinstance(prompt.get("prompt"), str):
        raise DataError(f"{place}: a dict needs a string under 'prompt'; it has {sorted(prompt)}.")
    for key in RESERVED:
        if key in prompt:
            raise DataError(f"{place}: {key!r} is already an argument of reward functions; rename the key.")
    if not isinstance(prompt.get(NEGATIVE, ""), str):
        raise DataError(f"{place}: {NEGATIVE!r} must be a string.")
    return prompt["prompt"], {key: value for key, value in prompt.items() if key != "prompt"}
