"""Text to token ids, once: special tokens are added where the tokenizer's own encoding adds them, and never twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass
class Dialogue:
    """Token ids, and which of them are outputs: what the model should have said. The first is never one."""

    ids: list[int]
    is_output: list[bool]

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """Token ids of prompts and of outputs.

    A text that opens a sequence begins with BOS if the tokenizer's own encoding begins with it, and a sequence that
    would be empty holds BOS (or EOS where there is none), so that the first token of an answer has a state to be
    predicted from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id
        bos: int | None = tokenizer.bos_token_id
        self.start: int = self.eos if bos is None else bos
        self.adds_start = tokenizer("a").input_ids[:1] == [bos]

    def opening(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that open a sequence; at least one each."""
        starts = [[self.start] if self.adds_start else []] * len(texts)
        rows = []
        for start, ids in zip(starts, self.following(texts), strict=True):
            rows.append((start if ids[:1] != start else []) + ids or [self.start])
        return rows

    def following(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that continue a sequence."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids

    def cut(self, row: list[T], longest: int, side: str | None = None) -> list[T]:
        """At most `longest` ids, or what goes with them, cut on `side` or else on the tokenizer's truncation side.

        A BOS that the tokenizer adds stays: without it a model meets text that it has never seen begin.
        """
        if len(row) <= longest:
            return row
        if (side or self.tokenizer.truncation_side) == "right":
            return row[:longest]
        start = min(int(self.adds_start), longest)
        return row[:start] + row[len(row) - longest + start :]
