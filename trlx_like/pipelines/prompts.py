"""Prompts: checked, tokenised once, and drawn in a shuffled order that a checkpoint remembers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trlx_like.errors import DataError
from trlx_like.pipelines.chat import ChatPrompt, encode_prompt, is_messages, template_options, warn_of_ending
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.pipelines.truncation import Lost, Truncation
from trlx_like.registry import Registry

DATAPIPELINES: Registry[Any] = Registry(
    "data pipeline", lazy={"PromptPipeline": "trlx_like.pipelines.prompts:PromptPipeline"}
)
register_datapipeline = DATAPIPELINES.register

Batch_co = TypeVar("Batch_co", covariant=True)

RESERVED = ("samples", "prompts", "outputs", "tokenizer")
"""Keys that a prompt may not have: reward functions are called with these keywords already."""


@dataclass
class PromptBatch:
    """Prompts as token ids, and what else the user gave with each of them."""

    ids: list[list[int]]
    metadata: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.ids)

    def tensors(self, pad: int) -> tuple[Tensor, Tensor]:
        """Left-padded ids [B, P] and their mask [B, P] (bool)."""
        longest = max(len(row) for row in self.ids)
        ids = torch.full((len(self), longest), pad)
        mask = torch.zeros(len(self), longest, dtype=torch.bool)
        for row, entries in enumerate(self.ids):
            ids[row, longest - len(entries) :] = torch.tensor(entries)
            mask[row, longest - len(entries) :] = True
        return ids, mask

    def __getitem__(self, rows: slice) -> PromptBatch:
        return PromptBatch(self.ids[rows], self.metadata[rows])

    def repeated(self, times: int) -> PromptBatch:
        """Each prompt `times` times, one after the other."""
        rows = [row for row in range(len(self)) for _ in range(times)]
        return PromptBatch([self.ids[row] for row in rows], [self.metadata[row] for row in rows])


class PromptPipeline:
    """Prompts that a text trainer generates from.

    prompts: strings or lists of messages, or dicts with either under "prompt"; their other keys reach the reward
    function as keywords (one list each). Messages get the header of an answer by the tokenizer's chat template (which
    sees the key "tools", and is told what `template` has), and reach the reward function as `messages`.
    max_prompt_length: in tokens; longer ones are cut on the tokenizer's truncation side, but for the header of an
    answer, and the log says so. seq2seq: as of `TextEncoder`. Raises DataError with the row number for anything else.
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
        if isinstance(prompts, str):
            raise DataError("prompts is a string; give a list of them.")
        rows = [_read(prompt, row) for row, prompt in enumerate(prompts)]
        if not rows:
            raise DataError("prompts is empty; give at least one.")
        encoder = TextEncoder(tokenizer, seq2seq=seq2seq)
        texts = iter(encoder.opening([prompt for prompt, _ in rows if isinstance(prompt, str)]))
        whole: list[ChatPrompt] = []
        has_chats = False
        for row, (prompt, metadata) in enumerate(rows):
            if is_messages(prompt):
                place = f"prompts[{row}]"
                options = template_options(metadata, template, place)
                whole.append(encode_prompt(prompt, tokenizer, place=place, **options))
                if not has_chats:
                    warn_of_ending(prompt, tokenizer, **options)
                has_chats = True
            else:
                whole.append(ChatPrompt(next(texts), 0))
        self.ids = [encoder.cut_prompt(prompt.ids, max_prompt_length, prompt.header) for prompt in whole]
        lost = [Lost(prompt=len(before.ids) - len(after)) for before, after in zip(whole, self.ids, strict=True)]
        Truncation.of(lost).warn("prompts", f"train.seq_length less max_new_tokens ({max_prompt_length} tokens)")
        self.metadata = [
            metadata if isinstance(prompt, str) else {"messages": prompt, **metadata} for prompt, metadata in rows
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Sequence[int]) -> PromptBatch:
        return PromptBatch([self.ids[row] for row in rows], [self.metadata[row] for row in rows])

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[PromptBatch]:
        """One pass: in the order given, or shuffled by `generator`."""
        order = list(range(len(self)))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield self[order[start : start + size]]


class Prompts(Protocol[Batch_co]):
    """What prompts are drawn from: rows by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: list[int], /) -> Batch_co: ...


class PromptStream(Generic[Batch_co]):
    """Prompts without end, in a new order each pass. Its state is two numbers."""

    def __init__(self, pipeline: Prompts[Batch_co], seed: int) -> None:
        self.pipeline = pipeline
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def take(self, count: int) -> Batch_co:
        """The next `count` prompts; a pass that ends on the way is followed by the next."""
        rows: list[int] = []
        while len(rows) < count:
            if self.position == len(self.pipeline):
                self.epoch, self.position = self.epoch + 1, 0
            order = self._order()[self.position : self.position + count - len(rows)]
            self.position += len(order)
            rows.extend(order)
        return self.pipeline[rows]

    @property
    def next_epoch(self) -> int:
        """The pass that the next prompt belongs to, from 0."""
        return self.epoch + (self.position == len(self.pipeline))

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self.pipeline), generator=generator).tolist()
        return order

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "prompts": len(self.pipeline)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["prompts"] != len(self.pipeline):
            raise DataError(
                f"prompts: the run that is resumed had {state['prompts']}, now there are {len(self.pipeline)}."
            )
        self.epoch, self.position = state["epoch"], state["position"]


def _read(prompt: Any, row: int) -> tuple[str | Sequence[Any], dict[str, Any]]:
    """Text or messages, and what came with them."""
    if isinstance(prompt, str) or is_messages(prompt):
        return prompt, {}
    if isinstance(prompt, Mapping):
        if not (isinstance(prompt.get("prompt"), str) or is_messages(prompt.get("prompt"))):
            raise DataError(
                f"prompts[{row}]: a dict needs a string or messages under 'prompt'; it has {sorted(prompt)}."
            )
        for key in RESERVED:
            if key in prompt:
                raise DataError(f"prompts[{row}]: {key!r} is already an argument of reward functions; rename the key.")
        return prompt["prompt"], {key: value for key, value in prompt.items() if key != "prompt"}
    raise DataError(f"prompts[{row}] is a {type(prompt).__name__}; give a string, messages, or a dict with 'prompt'.")
