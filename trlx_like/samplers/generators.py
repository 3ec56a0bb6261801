"""Engines that turn prompts into token ids."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trlx_like.data import Completion
from trlx_like.registry import Registry
from trlx_like.samplers.generation import eos_ids

GENERATORS: Registry[Any] = Registry(
    "sampler engine", lazy={"transformers": "trlx_like.samplers.generators:TransformersGenerator"}
)
register_generator = GENERATORS.register


class Generator(Protocol):
    """What an engine does. Constructed as `Engine(lm, tokenizer, allowed)`."""

    def generate(self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str]) -> Completion:
        """prompt [B, P] left-padded, prompt_mask [B, P] bool -> a Completion whose responses end with the first EOS
        (kept), or when a `stop` string is complete, or at `config.max_new_tokens`."""
        ...

    def sync_weights(self, policy: nn.Module) -> None:
        """Brings the engine to the policy's present weights."""
        ...


class AllowedTokens(LogitsProcessor):
    """Takes away the tokens that may not follow the last one: `allowed[previous, next]` is True where it may."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.masked_fill(~self.allowed[input_ids[:, -1]], -torch.inf)


class TransformersGenerator:
    """`transformers`' own generate(), with the model that is trained: its weights are always the present ones."""

    def __init__(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, allowed: Tensor | None = None) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.processors = LogitsProcessorList([] if allowed is None else [AllowedTokens(allowed)])

    def sync_weights(self, policy: nn.Module) -> None:
        return

    @torch.no_grad()
    def generate(self, prompt: Tensor, prompt_mask: Tensor, config: GenerationConfig, stop: list[str]) -> Completion:
        extra: dict[str, Any] = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        was_training = self.lm.training
        self.lm.eval()  # with dropout, and without a KV cache under gradient checkpointing, otherwise
        ids: Tensor = self.lm.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=prompt_mask.long(),
            generation_config=config,
            logits_processor=self.processors,
            **extra,
        )
        self.lm.train(was_training)
        response = ids[:, prompt.shape[1] :]  # [B, R]
        lengths = ends(response, eos_ids(config))
        if stop:
            lengths = torch.minimum(lengths, self._stops(response, lengths, stop))
        response = response[:, : int(lengths.max())]
        mask = torch.arange(response.shape[1], device=response.device) < lengths[:, None]
        return Completion(prompt, prompt_mask, response, mask)

    def _stops(self, response: Tensor, lengths: Tensor, stop: list[str]) -> Tensor:
        """Tokens until the first stop string is complete, for each row; its length where there is none."""
        found = lengths.tolist()
        for row, length in enumerate(found):
            ids = response[row, :length].tolist()
            if any(s in self.tokenizer.decode(ids) for s in stop):
                found[row] = next(
                    n for n in range(1, length + 1) if any(s in self.tokenizer.decode(ids[:n]) for s in stop)
                )
        return torch.tensor(found, device=response.device)


def ends(response: Tensor, eos: list[int]) -> Tensor:
    """Tokens of each row up to its first EOS, that one counted; all of them where there is none. [B, R] -> [B]"""
    is_eos = torch.isin(response, torch.tensor(eos, device=response.device, dtype=response.dtype))
    first = is_eos.long().argmax(dim=1) + 1
    return torch.where(is_eos.any(dim=1), first, response.shape[1])
