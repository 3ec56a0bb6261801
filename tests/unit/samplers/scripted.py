"""Real models that can only say one thing: a table of allowed tokens leaves one successor for each token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tests.tiny import tiny_lm, tiny_tokenizer
from trlx_like.config import TokenizerConfig
from trlx_like.data import Completion
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.pipelines.prompts import PromptBatch, PromptPipeline
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.text import TextSampler

EOS = 0


def table(*chains: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Tensor:
    """bool [V, V]: the letters of each chain follow each other; "." at the end of a chain stands for EOS."""
    tokenizer = tokenizer or tiny_tokenizer()
    allowed = torch.zeros(32, 32, dtype=torch.bool)
    for chain in chains:
        ids = [EOS if letter == "." else tokenizer.convert_tokens_to_ids(letter) for letter in chain]
        allowed[ids[:-1], ids[1:]] = True
    allowed[~allowed.any(dim=1), EOS] = True
    assert (allowed.sum(dim=1) == 1).all(), "two chains disagree"
    return allowed


def loaded_tokenizer(pad: bool = True) -> PreTrainedTokenizerBase:
    """As a trainer loads it: without a pad token EOS pads."""
    return load_tokenizer(TokenizerConfig(), None, tiny_tokenizer(pad))


def spelled(completion: Completion, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """Responses in letters as the mask cuts them, "." for EOS."""
    tokenizer = tokenizer or tiny_tokenizer()
    rows = [ids[mask].tolist() for ids, mask in zip(completion.response, completion.mask, strict=True)]
    return ["".join("." if i == EOS else str(tokenizer.decode([i])) for i in ids) for ids in rows]


def prompts(texts: list[str], tokenizer: PreTrainedTokenizerBase | None = None) -> PromptBatch:
    pipeline = PromptPipeline(texts, 20, tokenizer or tiny_tokenizer())
    return pipeline[range(len(texts))]


def sampler(
    allowed: Tensor | None = None,
    *,
    lm: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop: tuple[str, ...] = (),
    separator: str | None = None,
    batch_size: int | None = None,
) -> TextSampler:
    tokenizer = tokenizer or tiny_tokenizer()
    generator = TransformersEngine(lm or tiny_lm(), tokenizer, allowed)
    return TextSampler(generator, tokenizer, stop_sequences=stop, separator=separator, batch_size=batch_size)


class Messages(logging.Handler):
    """Keeps what is logged in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def transformers_messages() -> Iterator[list[str]]:
    """What transformers logs, including what it would log only once."""
    messages: list[str] = []
    handler = Messages(messages)
    transformers_logging.warning_once.cache_clear()
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
