"""Options of generation that a method refuses, and the longest response that has to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.support import VALID, errors_of, sentence_of
from trlx_like.config import METHODS
from trlx_like.config.methods.ilql import ILQLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.config.problems import shown
from trlx_like.errors import ConfigError
from trlx_like.presets import default_dpo_config, default_ilql_config, default_ppo_config, default_sft_config

REFUSED = [
    ("repetition_penalty", 1.1, "1.0 or null"), ("encoder_repetition_penalty", 1.1, "1.0 or null"),
    ("num_beams", 2, "1 or null"), ("do_sample", False, "true"), ("length_penalty", 2.0, "1.0 or null"),
    ("sequence_bias", [[[3], -5.0]], "null"), ("remove_invalid_values", True, "false or null"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["PPOConfig", "GRPOConfig", "RLOOConfig", "OnlineDPOConfig"])
@pytest.mark.parametrize(("option", "value", "use"), REFUSED)
def test_sampling_that_a_loss_cannot_account_for_is_refused(option: str, value: Any, use: str, name: str) -> None:
    kind: Any = METHODS.get(name)
    gen_kwargs = {"max_new_tokens": 4, option: value}
    with pytest.raises(ConfigError) as error:
        kind(gen_kwargs=gen_kwargs)
    given = shown(value)
    instead = (
        "To find likelier text than sampling does, use top_k, top_p, min_p or a lower temperature, which the loss can "
        "account for, or RFTTrainer, which imitates the best of any responses. "
    )
    assert str(error.value) == (
        f"method.gen_kwargs.{option}: {given} samples text in a way the loss cannot account for; use {use}. "
        f"{instead if option == 'num_beams' else ''}"
        "To keep it for evaluation, set method.gen_experience_kwargs for the training."
    )
    config = kind(gen_kwargs=gen_kwargs, gen_experience_kwargs={"max_new_tokens": 4, "temperature": 0.7})
    assert config.experience_kwargs == {"max_new_tokens": 4, "temperature": 0.7}


def test_values_that_switch_an_option_off_are_accepted() -> None:
    neutral = {
        "top_k": 0,
        "top_p": 1,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "do_sample": True,
        "min_p": None,
    }
    assert PPOConfig(gen_kwargs={"max_new_tokens": 4, **neutral}).experience_kwargs["top_k"] == 0


def test_a_sweep_in_gen_kwargs_needs_its_own_kwargs_for_experience() -> None:
    sweep = {"max_new_tokens": [4, 60], "temperature": [0.5, 1.0], "eos_token_id": [1, 2]}
    with pytest.raises(ConfigError) as error:
        PPOConfig(gen_kwargs=sweep)
    advice = "To keep it for evaluation, set method.gen_experience_kwargs for the training."
    assert str(error.value).split("\n") == [
        f"method.gen_kwargs.max_new_tokens: [4, 60] is a sweep; text to train on needs one value. {advice}",
        f"method.gen_kwargs.temperature: [0.5, 1.0] is a sweep; text to train on needs one value. {advice}",
    ]
    PPOConfig(gen_kwargs=sweep, gen_experience_kwargs={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="method.gen_kwargs.temperature: must be a number above 0, got -1"):
        PPOConfig(gen_kwargs={**sweep, "temperature": [0.5, -1]}, gen_experience_kwargs={"max_new_tokens": 4})
    with pytest.raises(ConfigError, match="method.gen_kwargs.temperature: an empty list has no value to try"):
        PPOConfig(gen_kwargs={**sweep, "temperature": []}, gen_experience_kwargs={"max_new_tokens": 4})


def test_the_longest_of_a_sweep_must_fit(tmp_path: Path) -> None:
    text = VALID + "  gen_kwargs: {max_new_tokens: [8, 64]}\n  gen_experience_kwargs: {max_new_tokens: 8}\n"
    assert errors_of(tmp_path, text) == [
        "x.yml:11: method.gen_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."
    ]


def test_what_the_method_generates_must_fit_the_sequence() -> None:
    short = {"train": {"seq_length": 24}}
    too_long = "method.gen_kwargs.max_new_tokens: 40 must be below train.seq_length (24)."
    assert sentence_of(lambda: default_ppo_config().evolve(**short)) == too_long
    for base in (default_sft_config(), default_dpo_config(), default_ilql_config()):
        base.evolve(**short)  # without prompts nothing is generated
        prompts = {**short, "data": {"eval_prompts": "prompts.txt"}}
        longest = base.method.to_dict()["gen_kwargs"]["max_new_tokens"]
        assert sentence_of(lambda: base.evolve(**prompts)) == too_long.replace("40", str(longest))  # noqa: B023


WRONG: dict[str, Any] = {
    "top_k": -1, "top_p": 0, "min_p": 1.5, "do_sample": None, "num_beams": 0, "use_cache": 1, "eos_token_id": "a",
    "cache_implementation": "offloaded", "bad_words_ids": [1], "repetition_penalty": True, "early_stopping": "soon",
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), WRONG.items())
def test_a_value_of_the_wrong_kind_is_refused_with_what_would_be_right(option: str, value: Any) -> None:
    sentence = sentence_of(lambda: SFTConfig(gen_kwargs={"max_new_tokens": 4, option: value}))
    assert sentence.startswith(f"method.gen_kwargs.{option}: must be ") and sentence.endswith(f"got {shown(value)}.")


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    assert sentence_of(lambda: SFTConfig(gen_kwargs={"max_new_tokens": 4, "temprature": 1.0})) == (
        "method.gen_kwargs.temprature: is not an option of text generation. Did you mean temperature?"
    )
    assert sentence_of(lambda: SFTConfig(gen_kwargs={"max_new_tokens": 4, "beta": 1.0})).startswith(
        "method.gen_kwargs.beta: is not an option of text generation."
    )
    ILQLConfig(gen_kwargs={"max_new_tokens": 4, "beta": 1.0})
