"""The growing cache: what it holds is what transformers' own holds, and where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import GenerationConfig, OpenAIGPTConfig, OpenAIGPTLMHeadModel
from transformers.cache_utils import DynamicLayer

from tests.tiny import tiny_lm
from tests.unit.samplers.scripted import prompts, sampler
from trlx_like.models import LanguagePolicy
from trlx_like.samplers.cache import GrowingLayer, growing_cache


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), wider=st.integers(0, 3), longest=st.integers(1, 99)
)
def test_it_holds_what_transformers_own_layer_holds(lengths: list[int], wider: int, longest: int) -> None:
    """Keys and values may be of different widths, as with latent attention; more may come than were announced."""
    torch.manual_seed(0)
    ours, theirs = GrowingLayer(longest), DynamicLayer()
    for length in lengths:
        states = torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 4 + wider)
        for got, expected in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(got, expected)
        assert ours.get_seq_length() == theirs.get_seq_length() == ours.length
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_it_is_copied_only_when_it_is_full() -> None:
    """Of 3 tokens, 1 more makes room for 8, the 9th for the 12 there may be, and the 13th for itself."""
    layer, rooms = GrowingLayer(12), []
    for length in (3, *[1] * 10):
        keys, _ = layer.update(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2))
        rooms.append((keys.untyped_storage().nbytes() // 8, keys.untyped_storage().data_ptr()))
    assert [size for size, _ in rooms] == [3, *[8] * 5, *[12] * 4, 13]
    assert len({place for _, place in rooms[1:6]}) == len({place for _, place in rooms[6:10]}) == 1


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
    cache = growing_cache(lm, GenerationConfig(**options), longest=9)
    assert (cache is not None) == grows
    if cache is not None:
        assert [type(layer) for layer in cache.layers] == [GrowingLayer] * lm.config.num_hidden_layers


def test_a_sliding_window_which_forgets_has_another() -> None:
    lm = tiny_lm("llama")
    lm.config.sliding_window, lm.config.layer_types = 4, ["sliding_attention"] * lm.config.num_hidden_layers
    assert growing_cache(lm, GenerationConfig(), longest=9) is None


def test_a_model_without_a_cache_generates_without_one() -> None:
    """The first GPT takes no `past_key_values`."""
    config = OpenAIGPTConfig(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    lm = OpenAIGPTLMHeadModel(config).eval()
    assert growing_cache(lm, GenerationConfig(), longest=9) is None
    samples = sampler(lm=lm).sample(prompts(["ab", "cdefg"]), {"max_new_tokens": 4, "eos_token_id": 31})
    scored = LanguagePolicy(lm)(samples.completion).logprobs
    assert samples.sampling_logprobs is not None
    mask = samples.completion.mask  # a response may end early
    torch.testing.assert_close(samples.sampling_logprobs[mask], scored[mask], rtol=0, atol=1e-5)
