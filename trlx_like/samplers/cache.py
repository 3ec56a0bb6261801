"""A KV cache with room for more tokens than it holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values [B, heads, T, width] of a layer, which has room for twice as many whenever it is full.

    `DynamicLayer` copies all of them for each token, so that what a token costs grows with those before it.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.room, self.length = [key_states, value_states], key_states.shape[-2]
        else:
            self._append(key_states, value_states)
        self.keys, self.values = (held[..., : self.length, :] for held in self.room)
        return self.keys, self.values

    def _append(self, *states: Tensor) -> None:
        before, self.length = self.length, self.length + states[0].shape[-2]
        if self.length > self.room[0].shape[-2]:
            full, self.room = self.room, [_twice(held, self.length) for held in self.room]
            for held, old in zip(self.room, full, strict=True):
                held[..., :before, :] = old[..., :before, :]
        for held, new in zip(self.room, states, strict=True):
            held[..., before : self.length, :] = new


def _twice(held: Tensor, length: int) -> Tensor:
    return held.new_empty(*held.shape[:-2], 2 * length, held.shape[-1])


def growing_cache(lm: PreTrainedModel, config: GenerationConfig) -> Cache | None:
    """A cache for one call of `generate()`. None where the options or the kind of model ask for another."""
    decoder = lm.config.get_text_config(decoder=True)
    if lm.config.is_encoder_decoder or config.cache_implementation is not None or config.use_cache is False:
        return None
    if not lm._supports_default_dynamic_cache():  # type: ignore[operator]
        return None
    cache = DynamicCache(config=decoder)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer() for _ in cache.layers]  # type: ignore[no-untyped-call]
    return cache
