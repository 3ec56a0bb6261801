"""Prompts and responses that a user handles in a loop of their own: `generate`, `decode`, and what `step` is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trlx_like.data import Completion
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import Message, encode_prompt
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.samplers.text import TextSampler

Query = str | Tensor | Sequence[Message]
"""A prompt: text, token ids [P], or messages."""


class ByHand:
    """Turn queries into token ids, and sample responses to them.

    Args:
        tokenizer: the policy's.
        sampler: generates the responses.
        seq2seq: whether the model is an encoder-decoder.
        chat_options: passed to the chat template with messages.
    """

    def __init__(self, tokenizer: Any, sampler: TextSampler, *, seq2seq: bool, chat_options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.seq2seq = seq2seq
        self.chat_options = chat_options

    def ids(self, query: Query) -> list[int]:
        """Return the token ids of a prompt that is given as text, as messages or as ids [P]."""
        if isinstance(query, str):
            return TextEncoder(self.tokenizer, seq2seq=self.seq2seq).opening([query])[0]
        if not isinstance(query, Tensor):
            return encode_prompt(query, self.tokenizer, place="the query", **self.chat_options).ids
        ids: list[int] = query.reshape(-1).tolist()
        return ids

    def generate(self, queries: Sequence[Query], options: Mapping[str, Any]) -> list[Tensor]:
        """Sample one response to each query; return token ids [R] for each."""
        batch = PromptBatch([self.ids(query) for query in queries], [{} for _ in queries])
        return [element.response for element in self.sampler.sample(batch, options).completion.split()]

    def decode(self, ids: Sequence[Tensor]) -> list[str]:
        """Return the texts of rows of token ids, without special tokens."""
        return [str(self.tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in ids]

    def completions(self, queries: Sequence[Query], responses: Sequence[Tensor]) -> Completion:
        """Batch queries with the responses [R] to them. DataError for an empty response."""
        rows: list[Completion] = []
        for query, response in zip(queries, responses, strict=True):
            if not len(response):
                raise DataError(f"step: responses[{len(rows)}] is empty.")
            prompt, ids = torch.tensor(self.ids(query)), response.cpu()
            rows.append(Completion(prompt, torch.ones_like(prompt).bool(), ids, torch.ones_like(ids).bool()))
        return Completion.collate(rows)
