"""The growing cache: what it holds is what transformers' own holds, and where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from tests.tiny import tiny_lm
from trlx_like.samplers.cache import GrowingLayer, growing_cache


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), wider=st.integers(0, 3))
def test_it_holds_what_transformers_own_layer_holds(lengths: list[int], wider: int) -> None:
    """Keys and values may be of different widths, as with latent attention."""
    torch.manual_seed(0)
    ours, theirs = GrowingLayer(), DynamicLayer()
    for length in lengths:
        states = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4 + wider)
        for got, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(got, expected)
        assert ours.get_seq_length() == theirs.get_seq_length() == ours.length
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_it_is_copied_only_when_it_is_full() -> None:
    """Of 3 tokens, 1 more makes room for 8, and the 9th for 18."""
    layer, rooms = GrowingLayer(), []
    for length in (3, 1, 1, 1, 1, 1, 1):
        keys, _ = layer.update(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2))
        rooms.append((keys.untyped_storage().nbytes() // 8, keys.untyped_storage().data_ptr()))
    assert [size for size, _ in rooms] == [3, 8, 8, 8, 8, 8, 18]
    assert len({place for _, place in rooms[1:6]}) == 1


@pytest.mark.parametrize(
    ("family", "options", "grows"),
    [
        ("llama", {}, True),
        ("llama", {"cache_implementation": "static"}, False),
        ("llama", {"use_cache": False}, False),
        ("t5", {}, False),
    ],
)
def test_where_it_is_used(family: str, options: dict[str, Any], grows: bool) -> None:
    lm = tiny_lm(family)
    cache = growing_cache(lm, GenerationConfig(**options))
    assert (cache is not None) == grows
    if cache is not None:
        assert [type(layer) for layer in cache.layers] == [GrowingLayer] * lm.config.num_hidden_layers


def test_a_sliding_window_which_forgets_has_another() -> None:
    lm = tiny_lm("llama")
    lm.config.sliding_window, lm.config.layer_types = 4, ["sliding_attention"] * lm.config.num_hidden_layers
    assert growing_cache(lm, GenerationConfig()) is None
