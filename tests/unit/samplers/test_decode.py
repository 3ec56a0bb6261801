"""Decoding without rows that nobody needs: the tokens of `generate()`, and how much is computed for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Lfm2Config,
    LogitsProcessorList,
    OpenAIGPTConfig,
    PreTrainedModel,
    RoFormerConfig,
)

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_lm, tiny_tokenizer
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, prompts, sampler, spelled, table
from trlx_like.data import Completion
from trlx_like.models.policy import LanguagePolicy
from trlx_like.samplers.decode import needs_generate
from trlx_like.samplers.engines import AllowedTokens
from trlx_like.samplers.generation import generation_config
from trlx_like.samplers.stopping import ends

TEXTS = ["abcdefghij"[: 1 + number * 5 % 9] for number in range(9)]


def ids(completion: Completion) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(completion.response, completion.mask, strict=True)]


@contextmanager
def forwards(lm: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Collects the rows and the columns of what each forward pass reads."""
    seen: list[tuple[int, int]] = []

    def look(module: Any, args: Any, given: Any) -> None:
        rows, columns = given["input_ids"].shape
        seen.append((rows, columns))

    handle = lm.register_forward_pre_hook(look, with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_the_likeliest_tokens_are_those_of_generate(family: str) -> None:
    """Of prompts of many lengths, some of them equal, all at once and three at a time."""
    lm: Any = sharp_lm(family)
    batch = prompts([*TEXTS, *TEXTS[:3]])
    prompt, mask = batch.tensors(1)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    allowed = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.4  # many repeat a token otherwise
    lm.generation_config, lm.config.pad_token_id = GenerationConfig(), None
    theirs = {"attention_mask": mask.long(), "logits_processor": LogitsProcessorList([AllowedTokens(allowed)])}
    whole = lm.generate(prompt, **theirs, pad_token_id=1, **options)[:, prompt.shape[1] :]
    options["eos_token_id"] = [int(whole[0, 2]), int(whole[2, 0]), int(whole[4, 5])]
    lengths = ends(whole, options["eos_token_id"]).tolist()
    assert len(set(lengths)) > 1
    assert needs_generate(lm, GenerationConfig(**options)) is None
    for size in (None, 3):
        made = sampler(allowed, lm=lm, batch_size=size).sample(batch, options).completion
        assert ids(made) == [row[:length].tolist() for row, length in zip(whole, lengths, strict=True)]


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"top_p": 0.8, "min_new_tokens": 3}), ("gemma2", {"top_k": 7}), ("bloom", {})]
)
def test_a_row_is_the_same_alone_and_beside_rows_that_leave_and_come(family: str, options: dict[str, Any]) -> None:
    lm, given = sharp_lm(family), {"max_new_tokens": 20, "eos_token_id": [EOS, 5, 10, 15], **options}
    together = sampler(lm=lm, batch_size=4).sample(prompts(TEXTS), given, 3, choices=True)
    assert together.sampling_logprobs is not None
    for number in (0, 3, 8):
        alone = sampler(lm=lm).sample(prompts(TEXTS)[[number]], given, 3, choices=True)
        assert ids(alone.completion) == ids(together.completion[[number]])
        assert alone.sampling_logprobs is not None
        there = together.sampling_logprobs[number, : alone.sampling_logprobs.shape[1]]
        torch.testing.assert_close(alone.sampling_logprobs[0], there, rtol=0, atol=1e-5)
    scored = LanguagePolicy(lm)(together.completion).logprobs
    real = together.completion.mask
    torch.testing.assert_close(scored[real], together.sampling_logprobs[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("lacking", [-1, 40])
def test_an_eos_that_the_model_lacks_forbids_no_token(lacking: int) -> None:
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "temperature": 9.0}
    made, expected = (
        ids(sampler(lm=sharp_lm("gpt2")).sample(prompts(TEXTS), {**options, "eos_token_id": eos}, 3).completion)
        for eos in ([EOS, lacking], EOS)
    )
    assert made == expected and {len(row) for row in made} == {9}
    assert any(31 in row for row in made) and not any(EOS in row for row in made)


def test_what_could_be_drawn_is_known_of_rows_that_came_later() -> None:
    lm, given = sharp_lm("gpt2"), {"max_new_tokens": 9, "eos_token_id": [EOS, 5, 10, 15], "top_k": 3}
    together = sampler(lm=lm, batch_size=4).sample(prompts(TEXTS), given, 3, choices=True).completion
    for number, row in enumerate(together.split()):
        alone = sampler(lm=lm).sample(prompts(TEXTS)[[number]], given, 3, choices=True).completion.split()[0]
        assert row.choices is not None and alone.choices is not None
        assert row.choices.tolist() == alone.choices.tolist()
        assert row.choice_sizes is not None and row.choice_sizes.tolist() == [1] * len(row.response)


def test_finished_rows_are_not_computed() -> None:
    """The last token of a row is drawn, but not read: 5 + 1 + 2 tokens are 5 + 1 + 2 - 3 rows after the prompts."""
    lm = tiny_lm()
    with forwards(lm) as seen:
        made = sampler(table("abcdef", "xy.", "z."), lm=lm).sample(prompts(["a", "z", "x"]), {"max_new_tokens": 5})
    assert spelled(made.completion) == ["bcdef", ".", "y."]
    assert seen == [(3, 1), (2, 1), (1, 1), (1, 1), (1, 1)]


def test_new_prompts_take_the_places_of_finished_rows() -> None:
    """4 at a time of 8 that get 1 to 8 tokens: 1 place is a quarter, so the next prompt comes at once, the longest
    first. Two more steps than the longest response has, where two batches of 4 would take 5 + 8.
    """
    lm, letters = tiny_lm(), "ihgfedcb"
    with forwards(lm) as seen:
        made = sampler(table("bcdefghi."), lm=lm, batch_size=4).sample(prompts(list(letters)), {"max_new_tokens": 9})
    assert spelled(made.completion) == ["bcdefghi."[-length:] for length in range(1, 9)]
    assert sum(rows for rows, _ in seen) == sum(range(1, 9)) and max(rows for rows, _ in seen) == 4
    assert made.prompts == list(letters)


def test_equal_prompts_are_read_once() -> None:
    lm = sharp_lm("llama")
    with forwards(lm) as seen:
        made = sampler(lm=lm).sample(
            prompts(["abcdef"] * 4 + ["xyz"] * 4), {"max_new_tokens": 2, "eos_token_id": None}, 1
        )
    assert seen == [(2, 6), (8, 1)]
    assert len({tuple(row) for row in ids(made.completion)}) > 4  # each response has random numbers of its own


def test_stop_strings_are_looked_for_once_in_each_token_that_may_end_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After "bcdef" and "y."; nothing is decoded for a token without the last letter of a stop string."""
    seen: list[list[int]] = []
    tokenizer = tiny_tokenizer()
    decode = type(tokenizer).decode

    def watched(self: Any, row: list[int], **options: Any) -> Any:
        seen.append(row)
        return decode(self, row, **options)

    made = sampler(table("abcdefgh.", "xy."), tokenizer=tokenizer, stop=("ef",))
    engine, batch = made.engine, prompts(["a", "x"])
    monkeypatch.setattr(type(tokenizer), "decode", watched)
    out = engine.generate(
        *batch.tensors(1), generation_config({"max_new_tokens": 9}, tokenizer), list(made.stop_sequences)
    )
    b, c, d, e, f, y = (int(tokenizer.vocab[letter]) for letter in "bcdefy")
    assert seen == [[b], [y], [c], [d], [e], [f], [b, c, d, e, f]]  # an EOS needs no look
    assert spelled(out) == ["bcdef", "y."]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"do_sample": True, "temperature": 0.5, "top_k": 3, "min_new_tokens": 2}, None),
        ("llama", {"num_beams": 2}, "num_beams"),
        ("llama", {"repetition_penalty": 1.5}, "repetition_penalty"),
        ("llama", {"cache_implementation": "static"}, "cache_implementation"),
        ("llama", {"use_cache": False}, "use_cache"),
        ("t5", {}, "encoder"),
    ],
)
def test_what_is_left_to_generate(family: str, options: dict[str, Any], reason: str | None) -> None:
    found = needs_generate(tiny_lm(family), GenerationConfig(**options))
    assert found is None if reason is None else reason in str(found)


def test_models_without_a_plain_cache_are_left_to_generate() -> None:
    """The first GPT has none. Rows of LFM2 also have the states of convolutions, which cannot be left out of a row."""
    sizes: Any = {"vocab_size": 32, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}
    first = OpenAIGPTConfig(n_positions=32, n_embd=16, n_layer=2, n_head=2, **sizes)
    kinds = ["conv", "full_attention"]
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": kinds}
    mixed = Lfm2Config(hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads, **sizes)
    for config, reason in ((first, "without a cache"), (mixed, "holds more")):
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config).eval()
        assert reason in str(needs_generate(lm, GenerationConfig()))
        samples = sampler(lm=lm).sample(prompts(["abcd", "efgh"]), {"max_new_tokens": 4, "eos_token_id": 31})
        scored, real = LanguagePolicy(lm)(samples.completion).logprobs, samples.completion.mask
        assert samples.sampling_logprobs is not None
        torch.testing.assert_close(samples.sampling_logprobs[real], scored[real], rtol=0, atol=1e-5)


def test_a_model_that_counts_positions_by_itself_is_left_to_generate() -> None:
    """Of rows that end one after the other. RoFormer turns keys by the column that they stand in."""
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = RoFormerConfig(vocab_size=32, embedding_size=16, is_decoder=True, initializer_range=0.5, **sizes)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).eval()
    samples = sampler(lm=lm).sample(prompts(TEXTS), {"max_new_tokens": 20, "eos_token_id": [EOS, 5, 10, 15]}, 3)
    scored, real = LanguagePolicy(lm)(samples.completion).logprobs, samples.completion.mask
    assert samples.sampling_logprobs is not None and len(set(real.sum(dim=1).tolist())) > 2
    torch.testing.assert_close(samples.sampling_logprobs[real], scored[real], rtol=0, atol=1e-5)
    assert "counts positions" in str(needs_generate(lm, GenerationConfig()))
