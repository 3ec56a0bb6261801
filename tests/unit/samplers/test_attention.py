"""Attention of one new token per row: that of transformers, and used where it is faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, GotOcr2Config
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.tiny import tiny_lm
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, prompts, sampler
from trlx_like.samplers import attention, cache
from trlx_like.samplers.attention import NAME, attend, attention_for_decoding
from trlx_like.samplers.cache import RowCache


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_attended_values_are_those_of_transformers(groups: int, masked: bool, scale: float | None) -> None:
    layer: Any = SimpleNamespace(num_key_value_groups=6 // groups, is_causal=True)
    room = torch.randn(2, 9, groups, 20, 8)
    query, (key, value) = torch.randn(9, 1, 6, 8).transpose(1, 2), room[:, :, :, 3:17]
    mask = torch.arange(14) >= torch.arange(9)[:, None, None, None] if masked else None  # [9, 1, 1, 14]
    found, _ = attend(layer, query, key, value, mask, dropout=0.0, scaling=scale)
    right, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=scale)
    assert found.shape == right.shape and found.is_contiguous()
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["two tokens", "16 bits", "numbers as a mask", "a mask for each head"])
def test_anything_else_is_left_to_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, dtype = (2 if case == "two tokens" else 1), (torch.bfloat16 if case == "16 bits" else torch.float32)
    mask = torch.zeros(9, 1, 1, 5) if case == "numbers as a mask" else None
    mask = torch.ones(9, 6, 1, 5, dtype=torch.bool) if case == "a mask for each head" else mask
    query, state = torch.randn(9, 6, count, 8, dtype=dtype), torch.randn(9, 6, 5, 8, dtype=dtype)
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **given: given["scaling"])
    assert attend(torch.nn.Module(), query, state, state, mask, scaling=0.5) == 0.5  # type: ignore[comparison-overlap]


def test_a_model_attends_so_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, rows = tiny_lm("llama"), list[int]()

    def count(module: Any, query: Any, *given: Any, **more: Any) -> Any:
        rows.append(len(query))
        return attend(module, query, *given, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, count)
    sampler(lm=lm).sample(prompts(["ab"] * 7), {"max_new_tokens": 3, "eos_token_id": None}, 1)
    assert set(rows) == {7, 1}, "the prompt is read once"
    assert lm.config._attn_implementation == "sdpa"


def test_only_the_part_for_text_attends_so() -> None:
    """The part for images knows no attention but "eager", which is the name at the whole model then."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "intermediate_size": 32, "num_key_value_heads": 1, "model_type": "qwen2"}
    images = {**sizes, "image_size": 32, "patch_size": 16, "output_channels": 16, "mlp_dim": 16}
    lm = AutoModelForCausalLM.from_config(GotOcr2Config(text_config=text, vision_config=images, image_token_index=31))
    parts = lm.config, lm.config.text_config, lm.config.vision_config
    assert [part._attn_implementation for part in parts] == ["eager", "sdpa", "eager"]
    with attention_for_decoding(lm, RowCache(8, 4)):
        assert [part._attn_implementation for part in parts] == ["eager", NAME, "eager"]
    sampler(lm=lm.eval()).sample(prompts(["ab"] * 3), {"max_new_tokens": 3})
    assert [part._attn_implementation for part in parts] == ["eager", "sdpa", "eager"]


@pytest.mark.parametrize("kind", ["eager", "falcon"])
def test_a_model_with_another_attention_keeps_it(kind: str) -> None:
    lm = tiny_lm("falcon" if kind == "falcon" else "llama")
    lm.set_attn_implementation("eager" if kind == "eager" else "sdpa")
    before = lm.config._attn_implementation
    with attention_for_decoding(lm, RowCache(8, 4)):
        assert lm.config._attn_implementation == before


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_window", "opt"])
@pytest.mark.parametrize("ends", [None, [EOS, 5, 10, 15]])
@pytest.mark.parametrize("size", [None, 8])
def test_what_rows_share_is_read_once(
    family: str, ends: list[int] | None, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of several lengths have 3 rows each. They end together, or leave and let others in."""
    lm, texts = sharp_lm(family), [text for text in ("abcdefgh", "xyz", "klmno", "cab") for _ in range(3)]
    given = {"max_new_tokens": 12, "eos_token_id": ends, "top_k": 9}
    whole = sampler(lm=lm, batch_size=size).sample(prompts(texts), given, 5, choices=True)
    read: list[tuple[int, int, bool]] = []
    multiply = attention._by_prompt

    def look(states: Any, matrices: Any, common: Any) -> Any:
        read.append((len(states), len(matrices) // states.shape[1], common.places is None))
        return multiply(states, matrices, common)

    monkeypatch.setattr(attention, "_by_prompt", look)
    monkeypatch.setattr(cache, "LEAST_KEYS_SAVED", 1)
    monkeypatch.setattr(cache, "LEAST_ROWS", 1)
    once = sampler(lm=lm, batch_size=size).sample(prompts(texts), given, 5, choices=True)
    assert torch.equal(once.completion.response, whole.completion.response)
    assert once.sampling_logprobs is not None and whole.sampling_logprobs is not None
    torch.testing.assert_close(once.sampling_logprobs, whole.sampling_logprobs, rtol=0, atol=1e-5)
    products = 2 * lm.config.num_hidden_layers  # of a step
    if ends is None and size is None:
        assert read == [(12, 4, True)] * 11 * products
    else:
        assert len(read) >= products
    if ends is not None:
        assert not all(full for *_, full in read), "some rows have left"


@pytest.mark.parametrize("index", [[0] * 4 + [1] * 4, [0] * 5 + [1] * 3, [0, 1] * 4, [0] * 8])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_prompts_attend_to_what_each_would_alone(
    index: list[int], heads: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 heads of keys. A second attention beside, with keys of one token, is that of prompts that are read."""
    monkeypatch.setattr(cache, "LEAST_KEYS_SAVED", 1)
    monkeypatch.setattr(cache, "LEAST_ROWS", 1)
    held, read, count = RowCache(8, 12), DynamicCache(), 1 + max(index)
    mask = torch.arange(9) >= torch.tensor([0, 3 if padded else 0])[:count, None]
    read.update(*torch.randn(2, count, 2, 9, 8), 0)
    held.admit(read, torch.zeros(count, 9, dtype=torch.int64), mask, torch.tensor(index))
    seen = held.extend(torch.zeros(8, 1, dtype=torch.int64))
    keys, values = held.update(*torch.randn(2, 8, 2, 1, 8), 0)
    assert held.common is not None and (held.common.places is None) == (index not in ([0] * 5 + [1] * 3, [0, 1] * 4))
    visible = None if seen is None else seen.bool()[:, None, None]
    layer: Any = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=False)
    query = torch.randn(8, heads, 1, 8)
    with attention_for_decoding(tiny_lm(), held):
        for states, hidden in (((keys, values), visible), ((keys[:, :, :1], values[:, :, :1]), None)):
            found, _ = attend(layer, query, *states, hidden)
            right, _ = sdpa_attention_forward(layer, query, *states, hidden)
            torch.testing.assert_close(found, right, rtol=0, atol=1e-6)
