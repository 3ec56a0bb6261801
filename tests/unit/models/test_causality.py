"""Which models are causal: another last token may not change the logits before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_lm
from trlx_like.errors import ConfigError
from trlx_like.models.causality import require_causal

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("family", [*FAMILIES, *ODD_FAMILIES])
def test_causal_families(family: str) -> None:
    lm = tiny_lm(family)
    state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        torch.nn.Module.to(lm, dtype)
        require_causal(lm.train(), "m")
    assert lm.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_masked_language_model_is_causal_as_a_decoder_alone(is_decoder: bool) -> None:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(BertConfig(vocab_size=32, is_decoder=is_decoder, **SIZES))
    if is_decoder:
        require_causal(lm, "m")
    else:
        with pytest.raises(ConfigError, match="m: BertLMHeadModel is not causal"):
            require_causal(lm, "m")
