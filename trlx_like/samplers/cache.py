"""A key-value cache that grows geometrically instead of being copied for every token."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer [B, heads, T, width] in buffers that double when they are full.

    `DynamicLayer` of transformers copies its whole content for every token, so the cost of a token grows with the
    number of tokens before it.

    Args:
        longest: The expected number of tokens at the end. Buffers do not grow beyond it unless more tokens come.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest = longest

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, t, width]; return all of them so far."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.room, self.length = [key_states, value_states], key_states.shape[-2]
        else:
            self._append(key_states, value_states)
        self.keys, self.values = (held[..., : self.length, :] for held in self.room)
        return self.keys, self.values

    def _append(self, *states: Tensor) -> None:
        """Append to the buffers, after enlarging them if they are full."""
        before, self.length = self.length, self.length + states[0].shape[-2]
        if self.length > self.room[0].shape[-2]:
            size = max(self.length, min(2 * self.length, self.longest))
            full, self.room = self.room, [_larger(held, size) for held in self.room]
            for held, old in zip(self.room, full, strict=True):
                held[..., :before, :] = old[..., :before, :]
        for held, new in zip(self.room, states, strict=True):
            held[..., before : self.length, :] = new


def _larger(held: Tensor, size: int) -> Tensor:
    """Allocate an uninitialised buffer like `held` with room for `size` tokens."""
    return held.new_empty(*held.shape[:-2], size, held.shape[-1])


def growing_cache(lm: PreTrainedModel, config: GenerationConfig, longest: int) -> Cache | None:
    """Make a growing cache for one call of `generate()`, or return None if the model cannot use one.

    Args:
        lm: The language model that generates.
        config: The options of the call.
        longest: The most tokens that a row may have, prompt included.

    Returns:
        The cache, to be passed as `past_key_values`. None for encoder-decoders, for models without a plain dynamic
        cache (sliding windows, states), and for options that choose another cache or none.
    """
    decoder = lm.config.get_text_config(decoder=True)
    if lm.config.is_encoder_decoder or config.cache_implementation is not None or config.use_cache is False:
        return None
    takes_one = "past_key_values" in inspect.signature(lm.forward).parameters
    if not takes_one or not lm._supports_default_dynamic_cache():  # type: ignore[operator]
        return None
    cache = DynamicCache(config=decoder)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer(longest) for _ in cache.layers]
    return cache
