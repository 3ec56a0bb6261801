"""A KV cache with room for more tokens than it holds."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """Keys and values [B, heads, T, width] of a layer, which has room for twice as many whenever it is full.

    `DynamicLayer` copies all of them for each token, so that what a token costs grows with those before it.
    longest: tokens that there may be in the end; no room is made for more unless more come.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.longest = longest

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
            size = max(self.length, min(2 * self.length, self.longest))
            full, self.room = self.room, [_larger(held, size) for held in self.room]
            for held, old in zip(self.room, full, strict=True):
                held[..., :before, :] = old[..., :before, :]
        for held, new in zip(self.room, states, strict=True):
            held[..., before : self.length, :] = new


def _larger(held: Tensor, size: int) -> Tensor:
    return held.new_empty(*held.shape[:-2], size, held.shape[-1])


def growing_cache(lm: PreTrainedModel, config: GenerationConfig, longest: int) -> Cache | None:
    """A cache for one call of `generate()` with at most `longest` tokens a row, those of the prompt counted.

    None where the options or the kind of model ask for another, or for none.
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
