"""Generation options: what is asked for and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from tests.tiny import tiny_tokenizer
from tests.unit.samplers.scripted import transformers_messages
from trlx_like.errors import ConfigError
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
        ({"max_tokens": 5}, r"method\.gen_kwargs\.max_tokens is not an option"),
        ({"num_return_sequences": 2}, r"method\.gen_kwargs\.num_return_sequences \(2\): one completion a prompt"),
        ({"return_dict_in_generate": True}, r"method\.gen_kwargs\.return_dict_in_generate \(True\): token ids"),
        ({"stop_strings": ["a"]}, r"method\.gen_kwargs\.stop_strings \(\['a'\]\): use stop_sequences"),
        ({"max_new_tokens": -1}, r"method\.gen_kwargs: .*max_new_tokens"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation_config(options, tiny_tokenizer())


def test_values_that_change_nothing_are_taken() -> None:
    options = {"num_return_sequences": 1, "return_dict_in_generate": False, "stop_strings": None, "max_new_tokens": 3}
    assert generation_config(options, tiny_tokenizer()).max_new_tokens == 3
