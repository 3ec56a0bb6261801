"""Generation options: what is asked for and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.tiny import tiny_lm, tiny_tokenizer
from tests.unit.samplers.scripted import prompts, sampler, transformers_messages
from trlx_like.config import NEUTRAL, OnlineTextMethodConfig, TextMethodConfig
from trlx_like.config.elsewhere import answers
from trlx_like.config.generation import FORBIDDING, TYPES
from trlx_like.errors import ConfigError
from trlx_like.models.policy import LanguagePolicy
from trlx_like.samplers.generation import eos_ids, generation_config


def test_plain_sampling_is_the_default() -> None:
    config = generation_config({"max_new_tokens": 5}, tiny_tokenizer(bos=True))
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 1.0, 0, 1.0)
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (0, 1, 2)
    assert config.max_new_tokens == 5


def test_options_win() -> None:
    options = {"max_new_tokens": 5, "top_k": 7, "temperature": 0.5, "eos_token_id": [3, 4]}
    config = generation_config(options, tiny_tokenizer())
    assert (config.top_k, config.temperature, eos_ids(config)) == (7, 0.5, [3, 4])


def test_greedy_leaves_the_options_of_sampling_out() -> None:
    options = {"do_sample": False, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "typical_p": 0.9, "num_beams": 2}
    with transformers_messages() as messages:
        config = generation_config(options, tiny_tokenizer())
    plain = GenerationConfig(do_sample=False, num_beams=2, eos_token_id=0, pad_token_id=1)
    assert config.to_dict() == plain.to_dict() and messages == []


@pytest.mark.parametrize(("eos", "ids"), [(None, []), (3, [3]), ([3, 4], [3, 4])])
def test_eos_ids(eos: Any, ids: list[int]) -> None:
    assert eos_ids(GenerationConfig(eos_token_id=eos)) == ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, r"gen_kwargs\.max_tokens: is not an option of text generation"),
        ({"num_return_sequences": 2}, r"num_return_sequences: 2 is refused: each prompt gets one response"),
        ({"stop_strings": ["a"]}, r"stop_strings: \['a'\] is refused: use stop_sequences"),
        ({"max_new_tokens": -1}, r"max_new_tokens: must be a whole number of at least 1, got -1"),
        ({"epsilon_cutoff": 1.0}, r"epsilon_cutoff: must be a number of at least 0 below 1 or null, got 1\.0"),
        ({"eta_cutoff": 1.0}, r"eta_cutoff: must be a number of at least 0 below 1 or null, got 1\.0"),
        ({"suppress_tokens": [3], "forced_eos_token_id": 3}, r"method\.gen_kwargs: Every token in"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation_config(options, tiny_tokenizer())


def test_values_that_change_nothing_are_taken() -> None:
    options = {"num_return_sequences": 1, "return_dict_in_generate": False, "stop_strings": None, "max_new_tokens": 3}
    assert generation_config(options, tiny_tokenizer()).max_new_tokens == 3


# A value of each option that is allowed, which differs from what plain sampling has.
ALLOWED: dict[str, dict[str, Any]] = {
    **{name: {name: False} for name in ("do_sample", "use_cache")},
    **{name: {name: True} for name in ("disable_compile", "renormalize_logits", "remove_invalid_values")},
    **{name: {name: 2} for name in ("repetition_penalty", "encoder_repetition_penalty")},  # an int for a float
    **{name: {name: 3} for name in ("max_new_tokens", "top_k", "min_new_tokens", "pad_token_id", "num_beams")},
    **{name: {name: 0.4} for name in ("temperature", "top_p", "min_p", "top_h", "typical_p")},
    **{name: {name: 0.01} for name in ("epsilon_cutoff", "eta_cutoff")},
    **{name: {name: 2} for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")},
    **{name: {name: [3, 4]} for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")},
    **{name: {name: 3} for name in ("forced_bos_token_id", "forced_eos_token_id")},
    "cache_implementation": {"cache_implementation": "static"},
    "early_stopping": {"num_beams": 2, "early_stopping": "never"},
    "length_penalty": {"num_beams": 2, "length_penalty": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [2, 1.5]},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 5]]},
    "sequence_bias": {"sequence_bias": [[[3], -5.0]]},
    "watermarking_config": {"watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}},
}
FIELDS = {*GenerationConfig().to_dict(), *GenerationConfig().__dict__}


def test_every_option_of_the_installed_transformers_is_allowed_or_refused() -> None:
    assert {name for name in (*TYPES, *answers("generation")) if name in FIELDS} == FIELDS
    assert not TYPES.keys() & answers("generation").keys() and ALLOWED.keys() == TYPES.keys() <= FIELDS


@pytest.mark.parametrize(("given", "meant"), [(0.0, 0), (4.0, 4)])
def test_a_whole_top_k_may_be_written_with_a_point(given: float, meant: int) -> None:
    """As in files of trlX and programs of TRL."""
    options = OnlineTextMethodConfig(gen_kwargs={"max_new_tokens": 4, "top_k": given}).experience_kwargs
    top_k = generation_config(options, tiny_tokenizer()).top_k
    assert (top_k, type(top_k)) == (meant, int)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("option", sorted(TYPES))
def test_an_allowed_option_generates(option: str, family: str) -> None:
    options = {"max_new_tokens": 5, **ALLOWED[option]}
    TextMethodConfig(gen_kwargs=options)
    lm, separator = tiny_lm(family), "|" if family == "t5" else None
    out = sampler(lm=lm, separator=separator).sample(prompts(["abc", "d"]), options)
    assert len(out) == 2 and out.completion.mask.any(dim=1).all()
    if option in FORBIDDING:  # the learner scores over the same set of tokens
        OnlineTextMethodConfig(gen_kwargs=options)
        told = sampler(lm=lm, separator=separator).sample(prompts(["abc", "d"]), options, choices=True)
        drawn, mask = told.sampling_logprobs, told.completion.mask
        assert drawn is not None and told.completion.choices is not None
        scored = LanguagePolicy(lm)(told.completion).logprobs
        torch.testing.assert_close(scored[mask], drawn[mask], rtol=0, atol=1e-5)
    elif option in NEUTRAL:
        with pytest.raises(ConfigError, match=f"method.gen_kwargs.{option}: .* the loss cannot account for"):
            OnlineTextMethodConfig(gen_kwargs={"max_new_tokens": 5, **ALLOWED[option]})
    else:  # of rollouts it leaves the distribution alone, so that sampler and learner agree on each log-probability
        OnlineTextMethodConfig(gen_kwargs=options)
        assert out.sampling_logprobs is not None


@pytest.mark.parametrize("option", sorted(answers("generation")))
def test_a_refused_option_is_one_sentence_with_a_reason(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^method\.gen_kwargs\.{option}: 7 is refused: [^\n]+\.$"):
        TextMethodConfig(gen_kwargs={"max_new_tokens": 5, option: 7})
    TextMethodConfig(gen_kwargs={"max_new_tokens": 5, option: None})
