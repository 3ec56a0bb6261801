"""Support users who write their own loop: `trainer.generate`, `trainer.decode` and `trainer.step`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trlx_like.config.generation import reshaping
from trlx_like.data import Completion
from trlx_like.errors import DataError
from trlx_like.pipelines.chat import Message, encode_prompt
from trlx_like.pipelines.prompts import PromptBatch
from trlx_like.pipelines.rows import is_messages
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.samplers.text import TextSampler

logger = logging.getLogger(__name__)

Query = str | Tensor | Sequence[Message]
"""A prompt: text, token ids [P], or chat messages."""
_Key = tuple[tuple[int, ...], tuple[int, ...]]  # the ids of a prompt and of its response


def is_one_query(queries: Any) -> bool:
    """Return whether a value is one query and not several: text, a tensor [P], or a list of chat messages."""
    return isinstance(queries, str) or (isinstance(queries, Tensor) and queries.dim() == 1) or is_messages(queries)


class ByHand:
    """Convert queries to token ids, and sample responses to them.

    Args:
        tokenizer: The tokenizer of the policy.
        sampler: Generates the responses.
        seq2seq: Whether the model is an encoder-decoder.
        chat_options: Options for the chat template, used when a query is a list of messages.
    """

    def __init__(self, tokenizer: Any, sampler: TextSampler, *, seq2seq: bool, chat_options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.seq2seq = seq2seq
        self.chat_options = chat_options
        self.version: int | None = None  # the number of steps of the policy that `sampled` is of
        self.sampled: dict[_Key, Completion] = {}  # responses of which some tokens could not be drawn
        self.temperature = 1.0  # of the log-probabilities in the loss
        self.unlike: dict[_Key, str] = {}  # responses from another distribution than that of the loss, and its options
        self._warned = False

    def ids(self, query: Query) -> list[int]:
        """Convert a prompt (text, chat messages, or token ids [P]) to a list of token ids."""
        if isinstance(query, str):
            return TextEncoder(self.tokenizer, seq2seq=self.seq2seq).opening([query])[0]
        if not isinstance(query, Tensor):
            if not is_messages(query):
                raise DataError(f"A query must be text, a tensor of token ids or a list of messages, not {query!r}.")
            return encode_prompt(query, self.tokenizer, place="the query", **self.chat_options).ids
        return cast(list[int], query.reshape(-1).tolist())

    def generate(self, queries: Any, options: Mapping[str, Any], version: int | None = None) -> Any:
        """Sample one response to each query.

        If options such as `top_k` forbid tokens, it is kept which tokens could be drawn, for `completions`.

        Args:
            queries: Prompts as text, chat messages, or token ids [P]; or one of them alone.
            options: Generation options.
            version: The number of steps of the policy; what another has sampled is forgotten. None: keep nothing.

        Returns:
            The token ids [R] of each response, in the order of the queries; a tensor [1, R] for one query alone.
        """
        if is_one_query(queries):
            return self.generate([queries], options, version)[0][None]
        if not len(queries):  # as of a process that has no share of a round
            return []
        batch = PromptBatch([self.ids(query) for query in queries], [{} for _ in queries])
        elements = self.sampler.sample(batch, options, choices=version is not None).completion.split()
        if version is not None and version != self.version:
            self.version, self.sampled, self.unlike = version, {}, {}
        self.sampled |= {_key(element): element.to("cpu") for element in elements if element.choices is not None}
        names = ["temperature"] * (options.get("temperature", 1.0) != self.temperature) + reshaping(options)
        if version is not None and names:
            said = ", ".join(f"{name}: {options.get(name, 1.0)}" for name in names)
            self.unlike |= dict.fromkeys(map(_key, elements), said)
        return [element.response for element in elements]

    def completions(self, queries: Sequence[Query], responses: Sequence[Tensor], *, cut: bool = False) -> Completion:
        """Collate queries and their responses into one padded batch.

        Args:
            queries: Prompts as text, chat messages, or token ids [P].
            responses: Token ids [R] or [1, R] of the response to each query.
            cut: Whether it has to be known for each response which tokens could be drawn.

        Returns:
            The batch, in which every token of a response is real.

        Raises:
            DataError: If a response is empty, or several in one tensor, or it is not known which tokens could be drawn.
        """
        rows: list[Completion] = []
        for query, response in zip(queries, responses, strict=True):
            given = torch.as_tensor(response).cpu()
            ids = given.reshape(-1)
            if given.shape[-1:] != ids.shape:
                raise DataError(f"step: responses[{len(rows)}] has the shape {list(given.shape)}; give [R] each.")
            if not len(ids):
                raise DataError(f"step: responses[{len(rows)}] is empty.")
            row = Completion.of_ids(torch.tensor(self.ids(query)), ids)
            rows.append(self.sampled.get(_key(row), row))
            if (said := self.unlike.get(_key(row))) and not self._warned:
                self._warned = True
                logger.warning(
                    f"step: responses[{len(rows) - 1}] was sampled with {said}, and the loss takes log-probabilities "
                    f"at temperature {self.temperature:g} without such options, so that probability ratios are not "
                    "those of what was sampled. Set method.gen_kwargs.temperature, or generate what is trained on "
                    "without the option."
                )
        unknown = [at for at, row in enumerate(rows) if row.choices is None]
        if cut and unknown or 0 < len(unknown) < len(rows):
            raise DataError(
                f"step: responses[{unknown[0]}] was not sampled by trainer.generate from the present policy, or was "
                "changed since, and the generation options forbid tokens (top_k, top_p, ...), so that the loss has to "
                "know which tokens could be drawn. Give the response as it was generated, or switch these options off."
            )
        self.sampled, self.unlike = {}, {}
        return Completion.collate(rows)


def own_tokens(masks: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Collate the response masks of a caller.

    Args:
        masks: For each response [R] or [1, R]: nonzero at the tokens that the policy has sampled.
        mask: True on the tokens of the responses. [B, R] bool

    Returns:
        True on the tokens of the policy. [B, R] bool

    Raises:
        DataError: If there is not one mask for each response and one entry for each token, or a mask is 0 everywhere.
    """
    rows, lengths = [row.cpu().reshape(-1) != 0 for row in masks], mask.sum(dim=1).tolist()
    if len(rows) != len(lengths):
        raise DataError(f"step: {len(rows)} response_masks for {len(lengths)} responses; give one for each.")
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise DataError(f"step: response_masks[{at}] has {len(row)} entries for {length} tokens.")
        if not row.any():
            raise DataError(f"step: response_masks[{at}] is 0 everywhere: there is no token to train on.")
    return pad_sequence(rows, batch_first=True).to(mask.device)


def _key(row: Completion) -> _Key:
    return tuple(row.prompt.tolist()), tuple(row.response.tolist())
