"""The conditioning of a denoising model on prompts, and its trajectories from noise to images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from trlx_like.data.experience import Experience, padded, padded_rows


@dataclass
class Conditioning(Experience):
    """Hold encoded prompts and negative prompts (for guidance) as the denoising model reads them.

    All prompts are encoded to the same length, so that nothing is padded here.
    """

    embeds: Tensor  # [B, L, D]
    pooled: Tensor | None  # [B, D'], only in some families
    negative_embeds: Tensor | None  # [B, L, D]
    negative_pooled: Tensor | None  # [B, D']

    def doubled(self) -> tuple[Tensor, Tensor | None]:
        """Concatenate negative prompts and prompts for one forward pass: embeddings and pooled ones. [2B, ...]"""
        assert self.negative_embeds is not None
        embeds = torch.cat([self.negative_embeds, self.embeds])
        if self.pooled is None or self.negative_pooled is None:
            return embeds, None
        return embeds, torch.cat([self.negative_pooled, self.pooled])


@dataclass
class DenoisingExperience(Conditioning):
    """Hold denoising trajectories with their log-probabilities and advantages.

    A batch may hold a single step of each trajectory instead of all steps, see `at`.
    """

    latents: Tensor  # [B, S + 1, *x] float32, noise first
    old_logprobs: Tensor  # [B, S] float32, mean over the dimensions of x
    order: Tensor  # [B, A] int64: the steps that can be learned from, in a random order per image
    rewards: Tensor  # [B] float32, NaN without one
    advantages: Tensor  # [B] float32
    caption: Tensor = padded(mask="caption_mask")  # [B, C] uint8: the prompt in UTF-8, to show it
    caption_mask: Tensor = padded(value=False, mask="caption_mask")  # [B, C] bool

    def at(self, column: int) -> Self:
        """Select one step of each image, the one in this column of `order`: latents [B, 2, *x], others [B, 1]."""
        t = self.order[:, column]
        rows = torch.arange(len(t), device=t.device)
        pair = torch.stack([self.latents[rows, t], self.latents[rows, t + 1]], dim=1)
        return replace(self, latents=pair, old_logprobs=self.old_logprobs[rows, t, None], order=t[:, None])


def as_bytes(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return texts as UTF-8 in a padded batch [B, C] uint8, and its mask [B, C] bool."""
    return padded_rows([torch.tensor(list(text.encode("utf-8", "replace")), dtype=torch.uint8) for text in texts])
