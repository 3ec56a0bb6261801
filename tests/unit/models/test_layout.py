"""The parts of a language model that are found by structure: blocks, head, width, and the start of a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, Llama4ForCausalLM, Llama4TextConfig

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_config, tiny_lm
from tests.unit.models.support import sharp_lm
from trlx_like.errors import ConfigError
from trlx_like.models.layout import base_model, blocks, decoder_start, hidden_size, last_hidden, rotates_by_length
from trlx_like.models.policy import LanguagePolicy


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_hidden_size_is_that_of_the_last_hidden_state(family: str) -> None:
    lm = sharp_lm(family)
    hidden = lm.base_model(input_ids=torch.tensor([[3]])).last_hidden_state
    assert hidden_size(lm) == hidden.shape[-1] == (8 if family == "opt_projected" else 16)


def test_a_model_without_a_head_and_one_without_blocks_are_refused() -> None:
    lm: Any = sharp_lm("gpt2")
    with pytest.raises(ConfigError, match=r"model\.model_path: GPT2Model is not a language model with a head"):
        LanguagePolicy(lm.base_model, num_layers_unfrozen=1)
    lm.config.n_layer = 7
    with pytest.raises(ConfigError, match=r"no list of 7 blocks .* use model\.num_layers_unfrozen: -1"):
        LanguagePolicy(lm, num_layers_unfrozen=1)


def test_a_model_whose_base_has_another_name_than_it_says() -> None:
    made: Any = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    lm = Llama4ForCausalLM(Llama4TextConfig(**made, **heads, vocab_size=32, pad_token_id=None)).eval()
    assert lm.base_model is lm and base_model(lm) is lm.model and len(blocks(lm)) == 2
    ids = torch.tensor([[3, 4]])
    with torch.no_grad(), last_hidden(lm) as newest:
        logits = lm(ids).logits
    assert torch.equal(lm.lm_head(newest[0]), logits)


@pytest.mark.parametrize(
    ("rope", "depends"),
    [
        (None, False),
        ({"rope_type": "yarn", "factor": 4.0}, False),
        ({"rope_type": "dynamic", "factor": 4.0}, True),
        ({"type": "dynamic", "factor": 4.0}, True),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": None}, False),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "longrope"}}, True),
    ],
)
def test_rotary_embeddings_that_depend_on_the_longest_position(rope: dict[str, Any] | None, depends: bool) -> None:
    lm = tiny_lm("llama")
    lm.config.rope_parameters = rope
    assert rotates_by_length(lm) == depends
    del lm.config.rope_parameters
    assert not rotates_by_length(lm) and not rotates_by_length(tiny_lm("gpt2"))


def test_what_a_decoder_begins_with() -> None:
    assert decoder_start(tiny_lm("gpt2")) is None
    assert decoder_start(tiny_lm("t5")) == decoder_start(tiny_lm("bart")) == 1
    lm = tiny_lm("t5")
    lm.generation_config.decoder_start_token_id = 5
    assert decoder_start(lm) == 5
    lm = AutoModelForSeq2SeqLM.from_config(tiny_config("t5", decoder_start_token_id=None))
    with pytest.raises(ConfigError, match="which token its decoder begins with; set decoder_start_token_id"):
        LanguagePolicy(lm)
