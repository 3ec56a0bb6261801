"""Drawing of tokens in `generate()` of transformers, with random numbers that follow from the key of each response."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from trlx_like.config.generation import NEUTRAL
from trlx_like.errors import NonFiniteError
from trlx_like.functional.choices import encode
from trlx_like.functional.counter import uniforms
from trlx_like.functional.draw import draw

_BLOCK = 64
"""Positions of a response whose random numbers are computed at once."""


class TokenSampler(LogitsProcessor):
    """A logits processor that samples the next tokens itself and records their probabilities.

    It sets all other logits to -inf, so that greedy decoding of `generate()` takes the sampled tokens.

    Args:
        keys: What the random numbers of each row follow from. [B] int64
        choices: Whether to record which tokens could be drawn.
    """

    def __init__(self, keys: Tensor, choices: bool) -> None:
        self.keys = keys
        self.choices: list[tuple[Tensor, Tensor]] | None = [] if choices else None  # of `encode`, one per call
        self._numbers: list[Tensor] = []  # of the next positions, each [B, 1], the nearest last
        self.probabilities: list[Tensor] = []  # of the sampled tokens, one [B, 1] per call

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Sample one token per row, and forbid all others."""
        if not self._numbers:
            block = uniforms(self.keys, _BLOCK, len(self.probabilities))
            self._numbers = list(block.split(1, dim=1))[::-1]
        if self.choices is not None:
            self.choices.append(encode(scores > -torch.inf))
        tokens, probabilities = drawn(scores, self._numbers.pop())
        self.probabilities.append(probabilities)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def drawn(scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits [B, V] by a random number [B, 1]; return it and its probability, [B, 1].

    Of a row that is no distribution it is the last token, with probability NaN, which `refuse_nan` finds.
    """
    probabilities = scores.softmax(dim=-1)
    tokens = draw(probabilities, uniform).clamp(max=scores.shape[-1] - 1)
    return tokens, probabilities.gather(1, tokens)


def refuse_nan(probabilities: Tensor) -> None:
    """Check the probabilities of all drawn tokens, once for all of them, as a GPU would have to wait for each check.

    Raises:
        NonFiniteError: If one is NaN. Finite weights may compute such scores if they are large.
    """
    if not bool(probabilities.isfinite().all()):
        raise NonFiniteError(
            "The model computes NaN or infinite scores of the next token, so nothing can be sampled. It has diverged, "
            "or its numbers are too large for backend.mixed_precision: go on from an earlier checkpoint with a smaller "
            "optimizer.kwargs.lr, or set backend.mixed_precision: no."
        )


def draws_token_by_token(config: GenerationConfig) -> bool:
    """Return whether one token after the other is drawn from a distribution that `warpers` make: not in a beam."""
    return bool(config.do_sample) and config.num_beams in (None, 1) and config.watermarking_config is None


def warpers(config: GenerationConfig, device: torch.device) -> list[LogitsProcessor]:
    """Return the logits processors that `generate()` of transformers applies last when it samples, in its order."""
    kinds: dict[str, Callable[[Any], LogitsProcessor]] = {
        "top_h": TopHLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
        "epsilon_cutoff": EpsilonLogitsWarper,
        "eta_cutoff": partial(EtaLogitsWarper, device=str(device)),
    }
    values = {name: getattr(config, name) for name in kinds}
    used = [kinds[name](value) for name, value in values.items() if value not in NEUTRAL[name]]
    return used if config.temperature == 1 else [TemperatureLogitsWarper(config.temperature), *used]
