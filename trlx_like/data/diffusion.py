"""What a denoising model is told of a prompt, and the way from noise to an image that it took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from trlx_like.data.experience import Experience


@dataclass
class Conditioning(Experience):
    """Prompts as the denoising model reads them. The negative ones are what guidance leads away from, if there is any.

    All prompts are encoded to the same length, so nothing is padded here.
    """

    embeds: Tensor  # [B, L, D]
    pooled: Tensor | None  # [B, D'], of families that have it
    negative_embeds: Tensor | None  # [B, L, D]
    negative_pooled: Tensor | None  # [B, D']

    def doubled(self) -> tuple[Tensor, Tensor | None]:
        """Embeddings and pooled ones for one forward over the negative prompts and then the prompts. [2B, ...]"""
        assert self.negative_embeds is not None
        embeds = torch.cat([self.negative_embeds, self.embeds])
        if self.pooled is None or self.negative_pooled is None:
            return embeds, None
        return embeds, torch.cat([self.negative_pooled, self.pooled])


@dataclass
class DenoisingExperience(Conditioning):
    """Images as they came out of noise, step by step, and what each was worth.

    The latents are those whose log-probabilities these are. A batch may hold one step in place of all: see `at`.
    """

    latents: Tensor  # [B, S + 1, *x] float32, noise first
    old_logprobs: Tensor  # [B, S] float32, mean over the dimensions of x
    order: Tensor  # [B, A] int64: the steps that can be learned from, in a random order of each image's own
    advantages: Tensor  # [B] float32

    def at(self, column: int) -> Self:
        """One step of each image, that which its order has in this column: latents [B, 2, *x], others [B, 1]."""
        t = self.order[:, column]
        rows = torch.arange(len(t), device=t.device)
        pair = torch.stack([self.latents[rows, t], self.latents[rows, t + 1]], dim=1)
        return replace(self, latents=pair, old_logprobs=self.old_logprobs[rows, t, None], order=t[:, None])
