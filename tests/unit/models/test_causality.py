"""Which models are causal: another last token may not change the logits before it, nor padding those behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, BertConfig, MambaConfig, RecurrentGemmaConfig, RwkvConfig

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_lm
from trlx_like.errors import ConfigError
from trlx_like.models.causality import require_causal, warn_of_padding

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


@pytest.mark.parametrize("family", [*FAMILIES, *ODD_FAMILIES, "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_for_which_padding_is_no_text(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    mamba = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2)
    lm: Any = AutoModelForCausalLM.from_config(mamba) if family == "mamba" else tiny_lm(family)
    warn_of_padding(lm.to(dtype).train(), "m")
    assert lm.training and "padding" not in caplog.text


@pytest.mark.parametrize("kind", ["rwkv", "bart", "recurrent_gemma"])
def test_a_family_that_reads_or_counts_padding_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    config: Any
    heads: Any = {"num_key_value_heads": 1, "head_dim": 8}
    if kind == "rwkv":
        config = RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2)
    elif kind == "bart":
        config = BartConfig(vocab_size=32, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32)
        config.is_decoder, config.is_encoder_decoder = True, False
    else:
        config = RecurrentGemmaConfig(vocab_size=32, **heads, **SIZES)
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config)
    warn_of_padding(lm, "model.model_path (m)")
    assert f"model.model_path (m): {type(lm).__name__} computes other logits for a text with padding" in caplog.text
