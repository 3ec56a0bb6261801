"""Prompts, which are checked and tokenised once, and taken in a shuffled order that a checkpoint remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trlx_like.data.experience import padded_rows
from trlx_like.data.flat import Flat, View
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import ChatPrompt, encode_prompt, template_options, warn_of_ending
from trlx_like.pipelines.forms import as_prompt, split_prompt
from trlx_like.pipelines.prepared import CHUNK, prepared
from trlx_like.pipelines.rows import PromptColumns, row_list
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.pipelines.truncation import Lost, Truncation
from trlx_like.registry import Registry

DATAPIPELINES: Registry[Any] = Registry(
    "data pipeline",
    option="train.pipeline",
    lazy={"PromptPipeline": "trlx_like.pipelines.prompts:PromptPipeline"},
)
register_datapipeline = DATAPIPELINES.register

Batch_co = TypeVar("Batch_co", covariant=True)

RESERVED = ("samples", "prompts", "outputs", "tokenizer", "output_ids", "output_offsets", "finish_reasons")
"""Keys that a prompt may not have, since reward functions are called with these keywords already."""


@dataclass
class PromptBatch(PromptColumns):
    """A batch of prompts as token ids, with the further keys of each prompt."""

    ids: list[list[int]]
    metadata: list[dict[str, Any]]

    def tensors(self, pad: int) -> tuple[Tensor, Tensor]:
        """Return left-padded ids [B, P] and their mask [B, P] (bool).

        Args:
            pad: The id to pad with.
        """
        return padded_rows([torch.tensor(row) for row in self.ids], pad, "left")


@dataclass
class PromptIds(Flat):
    """Hold the token ids of a prompt."""

    FIELDS: ClassVar[Mapping[str, str]] = {"ids": "token", "lost": "count"}

    ids: list[int]
    lost: Lost = Lost()


def _split(row: Any, place: str = "prompts") -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a row, and its further keys."""
    return split_prompt(row, place, RESERVED, chat=True)


def _metadata(row: Any) -> dict[str, Any]:
    """Return what a reward function gets of a row, beside the prompt as text."""
    prompt, metadata = _split(row)
    return metadata if isinstance(prompt, str) else {"messages": prompt, **metadata}


class PromptPipeline:
    """Tokenise the prompts that a text trainer generates from.

    The further keys of a prompt reach the reward function as keywords, one list per key. Messages are written by the
    tokenizer's chat template, with the header of an answer at the end, and reach the reward function as `messages`.

    Args:
        prompts: Strings or lists of messages, or dicts with either under "prompt" and further keys. A key "tools" is
            passed to the chat template too.
        max_prompt_length: Longest prompt in tokens. A longer one is cut on the tokenizer's truncation side, without
            the header of an answer, and a warning is logged.
        tokenizer: The tokenizer of the policy.
        seq2seq: Whether the policy is an encoder-decoder, see `TextEncoder`.
        template: Options of the chat template for all prompts.

    Raises:
        DataError: A prompt has another form. The error names the row.
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
        max_prompt_length: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq2seq: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        listed = row_list(prompts, "prompts")
        encoder = TextEncoder(tokenizer, seq2seq=seq2seq)

        def encoded(given: Any, row: int) -> PromptIds:
            place = f"prompts[{row}]"
            prompt, metadata = _split(given, place)
            if isinstance(prompt, str):
                whole = ChatPrompt(encoder.opening([prompt])[0], 0)
            else:
                whole = encode_prompt(prompt, tokenizer, place=place, **template_options(metadata, template, place))
            ids = encoder.cut_prompt(whole.ids, max_prompt_length, whole.header)
            return PromptIds(ids, Lost(prompt=len(whole.ids) - len(ids)))

        read, options = (as_prompt, ("prompt",)), [max_prompt_length, seq2seq, dict(template or {})]
        made = prepared(PromptIds, listed, read, encoded, encoder, *options, name="prompts")
        if not all(isinstance(_split(row)[0], str) for row in listed[:CHUNK]):
            warn_of_ending(tokenizer, template)
        limit = f"train.seq_length less max_new_tokens ({max_prompt_length} tokens)"
        Truncation(made).warn("prompts", limit)
        self.ids: Sequence[list[int]] = View(made, attrgetter("ids"))
        self.metadata: Sequence[dict[str, Any]] = View(listed, _metadata)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Sequence[int]) -> PromptBatch:
        """Return a batch of the chosen rows."""
        numbers = list(rows)
        return PromptBatch([self.ids[n] for n in numbers], [self.metadata[n] for n in numbers], numbers=numbers)


class Prompts(Protocol[Batch_co]):
    """Anything that has a length and returns a batch for a list of row numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: list[int], /) -> Batch_co: ...


class PromptStream(Generic[Batch_co]):
    """Take prompts endlessly, in a new random order in each epoch.

    Args:
        pipeline: The prompts.
        seed: Determines the order, together with the number of the epoch.
    """

    def __init__(self, pipeline: Prompts[Batch_co], seed: int) -> None:
        self.pipeline = pipeline
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self.taken: list[tuple[int, int]] = []  # epoch and row of each prompt of the last `take`
        self._drawn = -1, torch.empty(0)  # an epoch, and its order

    def take(self, count: int) -> Batch_co:
        """Return the next `count` prompts, which may continue into the next epoch."""
        self.taken = []
        while len(self.taken) < count:
            if self.position == len(self.pipeline):
                self.epoch, self.position = self.epoch + 1, 0
            rows = self._order()[self.position : self.position + count - len(self.taken)].tolist()
            self.position += len(rows)
            self.taken += [(self.epoch, row) for row in rows]
        return self.pipeline[[row for _, row in self.taken]]

    @property
    def rows(self) -> int:
        """The number of prompts in an epoch."""
        return len(self.pipeline)

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next prompt belongs to, from 0."""
        return self.epoch + (self.position == len(self.pipeline))

    def _order(self) -> Tensor:
        """Return the rows in the order of the present epoch, which is drawn once. [N]"""
        if self._drawn[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            self._drawn = self.epoch, torch.randperm(len(self.pipeline), generator=generator)
        return self._drawn[1]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data."""
        return {"epoch": self.epoch, "position": self.position, "prompts": len(self.pipeline)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a saved position. Raise DataError if the number of prompts differs."""
        if state["prompts"] != len(self.pipeline):
            raise DataError(
                f"prompts: the resumed run had {state['prompts']}, now there are {len(self.pipeline)}; "
                "pass the same ones."
            )
        self.epoch, self.position = state["epoch"], state["position"]
