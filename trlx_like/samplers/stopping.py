"""Where a response ends: at its first EOS, or with the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria

from trlx_like.data import Sampled
from trlx_like.data.experience import padded_rows
from trlx_like.samplers.generation import eos_ids


class StopStrings(StoppingCriteria):
    """End a row when its response completes a stop string; a stopping criterion. The prompt is not searched.

    Args:
        stop: The stop strings, at least one.
        tokenizer: Decodes the last tokens.
        prompt_width: How many columns of `input_ids` are the prompt.
    """

    def __init__(self, stop: list[str], tokenizer: PreTrainedTokenizerBase, prompt_width: int) -> None:
        self.stop = stop
        self.tokenizer = tokenizer
        self.prompt_width = prompt_width
        # A token is at least one byte. Four more, because some decoders change the first word of a text.
        self.longest = max(len(string.encode()) for string in stop) + 4
        self._may_end: dict[int, bool] = {}  # by token, whether it can be the last of a stop string

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Tell for each row whether a stop string is complete. [B] bool"""
        recent = input_ids[:, max(self.prompt_width, input_ids.shape[1] - self.longest) :]
        return torch.tensor([self.complete(ids) for ids in recent.tolist()], device=input_ids.device)

    def complete(self, ids: list[int]) -> bool:
        """Return True if the last token completes a stop string, so that the text of the last tokens contains it."""
        if ids[-1] not in self._may_end:
            alone = self.tokenizer.decode(ids[-1:])
            # It may be a part of a letter, or lose a space at its beginning when it is alone.
            unsure = not alone or "\ufffd" in alone or any(string[-1].isspace() for string in self.stop)
            self._may_end[ids[-1]] = unsure or any(string[-1] in alone for string in self.stop)
        if not self._may_end[ids[-1]]:
            return False
        text = self.tokenizer.decode(ids[-self.longest :])
        return any(string in text for string in self.stop)

    def lengths(self, response: Tensor, lengths: Tensor) -> Tensor:
        """Find where responses end.

        Args:
            response: Response token ids. [B, R]
            lengths: The lengths of the responses without stop strings. [B]

        Returns:
            How many tokens complete the first stop string of each row, or `lengths` if there is none. [B]
        """
        rows = zip(response.tolist(), lengths.tolist(), strict=True)
        found = [next((n for n in range(1, end) if self.complete(ids[:n])), end) for ids, end in rows]
        return torch.tensor(found, device=response.device)


def finished(
    prompt: Tensor,
    prompt_mask: Tensor,
    response: Tensor,
    config: GenerationConfig,
    stops: StopStrings | None,
    given: Tensor | None = None,
) -> Sampled:
    """Cut responses where they end.

    Args:
        prompt: [B, P]
        prompt_mask: [B, P] bool
        response: The generated ids, with anything behind the end. [B, R]
        config: Its EOS ids end a response.
        stops: What else ends a response; None: nothing does.
        given: How many ids of each row were generated; None: all. [B] int64
    """
    lengths = ends(response, eos_ids(config))
    if given is not None:
        lengths = torch.minimum(lengths, given)
    if stops is not None:
        lengths = stops.lengths(response, lengths)
    response = response[:, : int(lengths.max())]
    mask = torch.arange(response.shape[1], device=response.device) < lengths[:, None]
    return Sampled(prompt, prompt_mask, response.to(prompt.device), mask.to(prompt.device))


def finished_ids(
    prompt: Tensor,
    prompt_mask: Tensor,
    ids: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: list[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Sampled:
    """Cut responses of different lengths where they end.

    Args:
        prompt: [B, P]
        prompt_mask: [B, P] bool
        ids: The generated ids of each response.
        config: Its EOS ids end a response.
        stop: Strings that end one as well.
        tokenizer: Decodes tokens to find stop strings.
    """
    response, real = padded_rows([torch.tensor(row) for row in ids], config.pad_token_id or 0)
    stops = StopStrings(stop, tokenizer, 0) if stop else None
    return finished(prompt, prompt_mask, response, config, stops, real.sum(dim=1))


def ends(response: Tensor, eos: list[int]) -> Tensor:
    """Count the tokens of each row up to its first EOS, which is included.

    Args:
        response: Response token ids. [B, R]
        eos: The ids that end a response.

    Returns:
        The lengths; R for a row without EOS. [B]
    """
    is_eos = torch.isin(response, torch.tensor(eos, device=response.device, dtype=response.dtype))
    first = is_eos.long().argmax(dim=1) + 1
    return torch.where(is_eos.any(dim=1), first, response.shape[1])
