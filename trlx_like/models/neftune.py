"""Noise on the embeddings of a language model while it is fine-tuned (NEFTune), drawn by token and not by process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trlx_like.data import Completion
from trlx_like.functional.counter import keys, uniforms


@contextmanager
def noisy_embeddings(lm: PreTrainedModel, batch: Completion, alpha: float, stream: int) -> Iterator[None]:
    """Add noise to the embeddings in a `with` block: uniform in [-a, a] with a = alpha / sqrt(L H).

    Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv:2310.05914, algorithm 1.
    L is the number of real tokens of the row, and not its padded length as in TRL and transformers. The noise of a
    token follows from the stream and the tokens up to it, so it is the same in any batch and on any process.

    Args:
        lm: A causal language model, whose embeddings have the width H.
        batch: The rows that are run through the model in the block.
        alpha: The strength of the noise.
        stream: The stream of random numbers; see `functional.counter`.
    """
    ids = torch.cat([batch.prompt, batch.response], dim=1)  # [B, T]
    real = torch.cat([batch.prompt_mask, batch.mask], dim=1)  # [B, T]
    numbers = (ids << 32) + real.cumsum(dim=1)
    key = keys(stream, numbers, ids.device).masked_fill(~real, 0).cumsum(dim=1)  # [B, T]

    def add(module: Any, args: Any, embedded: Tensor) -> Tensor:
        width = embedded.shape[-1]
        limit = alpha * (real.sum(dim=1) * width) ** -0.5  # [B]
        # Row by row, as random numbers take 8 bytes each.
        rows = zip(key, limit, strict=True)
        return embedded + torch.stack([((2 * uniforms(of, width) - 1) * a).to(embedded.dtype) for of, a in rows])

    with lm.get_input_embeddings().register_forward_hook(add):
        yield
