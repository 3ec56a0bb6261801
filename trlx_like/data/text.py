"""Prompts and responses as token ids, which a sampler makes and a policy scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trlx_like.data.experience import Experience, padded


@dataclass
class Completion(Experience):
    """Hold token ids of prompts and of the responses that follow them.

    The ids are those that were sampled (or tokenised once); they are never made from text again.
    """

    prompt: Tensor = padded("left", mask="prompt_mask")  # [B, P] int64, P >= 1
    prompt_mask: Tensor = padded("left", False, mask="prompt_mask")  # [B, P] bool
    response: Tensor = padded()  # [B, R] int64
    mask: Tensor = padded(value=False)  # [B, R] bool, True on real response tokens; the first EOS is one
    choices: Tensor | None = padded(mask="choice_sizes", default=None, kw_only=True)
    """[B, L] int32: the sets of tokens that could be drawn, see `trlx_like.functional.choices`; None: all tokens."""
    choice_sizes: Tensor | None = padded(default=None, kw_only=True)  # [B, R] int32: words of `choices` per token
    # The states that enter the lowest block that is not frozen, kept so that the frozen ones run once a sample.
    prompt_trunk: Tensor | None = padded("left", mask="prompt_mask", default=None, kw_only=True)  # [B, P, H]
    response_trunk: Tensor | None = padded(default=None, kw_only=True)  # [B, R, H]

    @classmethod
    def of_ids(cls, prompt: Tensor, response: Tensor) -> Self:
        """Make an element without padding of the ids of a prompt [P] and its response [R]."""
        return cls(prompt, torch.ones_like(prompt).bool(), response, torch.ones_like(response).bool())

    @property
    def scored(self) -> Tensor:
        """Mask of the response tokens that a policy scores. [B, R] bool"""
        return self.mask

    def inputs(self, start: int | None = None) -> dict[str, Tensor]:
        """Return the keyword arguments of a language model's forward pass.

        Positions count real tokens only, so that padding does not shift them.

        Args:
            start: First token of the decoder, for an encoder-decoder whose encoder reads the prompt; None: a causal
                model reads prompt and response as one sequence.
        """
        if start is not None:
            ids, mask = padded_right(self.prompt, self.prompt_mask)
            first = torch.full_like(self.prompt[:, :1], start)
            decoder_mask = torch.cat([torch.ones_like(first), self.mask.long()], dim=1)  # [B, 1 + R]
            return {
                "input_ids": ids,
                "attention_mask": mask.long(),
                "decoder_input_ids": torch.cat([first, self.response], dim=1),
                "decoder_attention_mask": decoder_mask,  # without it some families take the first token for padding
            }
        attention_mask = torch.cat([self.prompt_mask, self.mask], dim=1)  # [B, P + R]
        return {
            "input_ids": torch.cat([self.prompt, self.response], dim=1),
            "attention_mask": attention_mask.long(),
            "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
        }

    def without_last(self) -> Completion:
        """Return what a causal model has to read to score the responses: all but the last token of each, [B, R - 1]."""
        return Completion(self.prompt, self.prompt_mask, self.response[:, :-1], self.mask[:, 1:])

    def completions(self) -> Completion:
        """Return the completions of the batch: itself."""
        return self

    @property
    def trunk(self) -> Tensor | None:
        """The kept states of prompts and responses, zero at padding. [B, P + R, H]"""
        if self.prompt_trunk is None or self.response_trunk is None:
            return None
        return torch.cat([self.prompt_trunk, self.response_trunk], dim=1)

    def keep(self, trunk: Tensor) -> None:
        """Keep the states [B, P + R, H] that enter the lowest block that is not frozen."""
        self.prompt_trunk, self.response_trunk = trunk.tensor_split([self.prompt.shape[1]], dim=1)

    def previous(self, start: int | None = None) -> Tensor:
        """Return the token before each response token; before the first it is `start`, if given. [B, R]"""
        first = self.prompt[:, -1:] if start is None else torch.full_like(self.prompt[:, -1:], start)
        return torch.cat([first, self.response[:, :-1]], dim=1)


@dataclass
class Sampled(Completion):
    """Hold completions that an engine has just sampled, with its log-probabilities and version if it reports them."""

    sampling_logprobs: Tensor | None = padded(default=None)  # [B, R] float32: of each token when it was sampled
    version: Tensor | None = None  # [B] int64: of the weights that each completion was sampled with

    @property
    def drawn(self) -> Tensor | None:
        """Return `sampling_logprobs` under its former name."""
        return self.sampling_logprobs


def padded_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of left-padded rows [B, P] and their mask to the right.

    Encoders count absolute positions from the first column, padding or not.
    """
    order = mask.long().argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
