"""Sampling by chunks, and the texts that people and reward functions see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import prompts, sampler, spelled, table
from trlx_like.data import Completion, Sampled
from trlx_like.models.policy import LanguagePolicy
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.samplers.text import TextSampler, TextSamples

NO_ENGINE: Any = None  # of samplers that only decode
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def test_chunks_change_nothing() -> None:
    texts = ["abcdefg", "h", "", "ij", "klmno"]
    lm = sharp_lm("llama")
    whole = sampler(lm=lm).sample(prompts(texts), GREEDY)
    for size in (1, 2, 3, 5, 9):
        parts = sampler(lm=lm, batch_size=size).sample(prompts(texts), GREEDY)
        assert spelled(parts.completion) == spelled(whole.completion)
        assert (parts.prompts, parts.outputs, parts.samples) == (whole.prompts, whole.outputs, whole.samples)
        for name in ("prompt_mask", "mask"):
            assert torch.equal(getattr(parts.completion, name), getattr(whole.completion, name))
        for one, other in zip(parts.completion.split(), whole.completion.split(), strict=True):
            assert one.prompt.tolist() == other.prompt.tolist()


def test_no_more_rows_at_once_than_asked_for() -> None:
    lm = sharp_lm("gpt2")
    rows = []
    handle = lm.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    sampler(lm=lm, batch_size=2).sample(prompts(["a", "b", "c", "d", "e"]), {"max_new_tokens": 1})
    handle.remove()
    assert rows == [2, 2, 1]


def test_what_tokens_were_drawn_with_is_known_of_all_parts_and_of_chosen_rows() -> None:
    lm = sharp_lm("llama")
    samples = sampler(lm=lm, batch_size=2).sample(
        prompts(["ab", "cdefg", "h"]), {"max_new_tokens": 9, "eos_token_id": 5}
    )
    for part in (samples, samples[[2, 0]]):
        scored = LanguagePolicy(lm)(part.completion).logprobs
        assert part.sampling_logprobs is not None
        torch.testing.assert_close(
            part.sampling_logprobs[part.completion.mask], scored[part.completion.mask], rtol=0, atol=1e-5
        )


def test_chunks_of_different_widths_keep_their_own_masks() -> None:
    out = sampler(table("abcdef.", "x."), batch_size=1).sample(prompts(["a", "x", "de"]), {"max_new_tokens": 9})
    assert spelled(out.completion) == ["bcdef.", ".", "f."]
    assert out.completion.mask.sum(dim=1).tolist() == [6, 1, 2] and out.finished == [True] * 3
    assert out.completion.prompt_mask.tolist() == [[False, True], [False, True], [True, True]]


def test_rows_and_chosen_rows() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "goal": 1}, {"prompt": "cd", "goal": 2}, {"prompt": "e"}]
    batch = PromptPipeline(rows, 20, tiny_tokenizer())[[0, 1, 2]]
    out = sampler(table("abcdef.")).sample(batch, {"max_new_tokens": 4})
    assert len(out) == 3
    assert out.rows()[0] == {
        "samples": "abcde",
        "prompts": "a",
        "outputs": "bcde",
        "metadata": {"goal": 1},
        "length": 4,
        "output_ids": out.completion.response[0].tolist(),
        "finish_reasons": "length",
    }
    chosen = out[[2, 0]]
    assert (chosen.prompts, chosen.outputs, chosen.finished) == (["e", "a"], ["f", "bcde"], [True, False])
    assert chosen.metadata == [{}, {"goal": 1}] and chosen.rows()[0]["length"] == 2
    assert spelled(chosen.completion) == ["f.", "bcde"]


def test_special_tokens_are_not_text() -> None:
    tokenizer = tiny_tokenizer(bos=True)
    completion = Completion(
        torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, True]]), torch.tensor([[4, 0]]), torch.ones(1, 2).bool()
    )
    decoded = TextSampler(NO_ENGINE, tokenizer).decode(completion)
    assert decoded == (["a"], ["b"], ["ab"])


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Words that carry the space before them, which decoding drops at the start of a text, as Llama's does."""
    vocabulary = {token: n for n, token in enumerate(["<eos>", "▁hello", "▁big", "▁world", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="?")


def test_the_space_between_prompt_and_output_is_kept() -> None:
    tokenizer = words_tokenizer()
    assert tokenizer.decode([3]) == "world"
    completion = Completion(
        torch.tensor([[0, 1], [1, 2]]),
        torch.tensor([[False, True], [True, True]]),
        torch.tensor([[3, 0], [3, 3]]),
        torch.tensor([[True, True], [True, False]]),
    )
    text = TextSampler(NO_ENGINE, tokenizer)
    assert text.decode(completion) == (
        ["hello", "hello big"],
        [" world", " world"],
        ["hello world", "hello big world"],
    )


@pytest.mark.parametrize("stop", [("big",), ("world", "big wor")])
def test_texts_are_cut_before_the_first_stop_sequence(stop: tuple[str, ...]) -> None:
    ids = torch.tensor([[1, 2, 3]])
    completion = Completion(torch.tensor([[1]]), torch.tensor([[True]]), ids, torch.ones_like(ids).bool())
    decoded = TextSampler(NO_ENGINE, words_tokenizer(), stop_sequences=stop).decode(completion)
    assert decoded == (["hello"], [" hello "], ["hello hello "])
    assert completion.response.tolist() == [[1, 2, 3]]


def test_sampling_logprobs_were_called_drawn() -> None:
    ids, mask, logprobs = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool), torch.rand(1, 2)
    sampled = Sampled(ids, mask, ids, mask, sampling_logprobs=logprobs)
    samples = TextSamples(sampled, ["a"], ["b"], ["ab"], ["eos"], [{}], sampling_logprobs=logprobs)
    assert sampled.drawn is logprobs and samples.drawn is logprobs
