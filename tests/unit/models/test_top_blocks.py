"""Which parameters are trained above a branch, and the copies of top blocks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, SwitchTransformersConfig

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES
from tests.unit.models.support import batch_of_ids, sharp_lm, valued_policy
from trlx_like.errors import ConfigError
from trlx_like.models.layout import blocks
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.top_blocks import TopBlocks, copied_top

LAYERS = 3


def parts(policy: LanguagePolicy) -> set[str]:
    """Which parts of the model are trained: numbers of blocks, and names of the rest."""
    names = {
        id(parameter): f"block {n}" for n, block in enumerate(blocks(policy.lm)) for parameter in block.parameters()
    }
    return {names.get(id(p), name) for name, p in policy.lm.named_parameters() if p.requires_grad}


# What follows the blocks and is trained with them.
NORMS = {
    "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    "llama": {"model.norm.weight"},
    "qwen3": {"model.norm.weight"},
    "gpt_neox": {"gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"},
    "opt": {"model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias"},
    "bloom": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
}


@pytest.mark.parametrize("unfrozen", [1, 2, LAYERS, LAYERS + 2])
@pytest.mark.parametrize("family", NORMS)
def test_trained_are_the_top_blocks_the_norm_and_an_untied_head(family: str, unfrozen: int) -> None:
    lm = sharp_lm(family)
    head = {n for n, p in lm.named_parameters() if p is lm.get_output_embeddings().weight}
    tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert tied == (family in ("gpt2", "opt", "bloom"))
    top = {f"block {n}" for n in range(max(0, LAYERS - unfrozen), LAYERS)}
    policy = LanguagePolicy(lm, num_layers_unfrozen=unfrozen)
    assert parts(policy) == top | NORMS[family] | (set() if tied else head)


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES + SEQ2SEQ_FAMILIES)
def test_all_or_nothing_is_trained(family: str) -> None:
    assert all(p.requires_grad for p in LanguagePolicy(sharp_lm(family)).parameters())
    frozen = valued_policy(sharp_lm(family), num_layers_unfrozen=0)
    assert parts(frozen) == set()
    assert all(p.requires_grad for p in frozen.heads.parameters())


def test_weights_that_were_frozen_before_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A loaded model keeps what one run froze, so that another run trains less than it says."""
    lm = sharp_lm("gpt2")
    with caplog.at_level(logging.INFO, "trlx_like"):
        LanguagePolicy(lm, num_layers_unfrozen=1)
        LanguagePolicy(lm, num_layers_unfrozen=1)
        assert caplog.messages == []
        LanguagePolicy(lm, num_layers_unfrozen=2)
        LanguagePolicy(lm)
    assert [message.partition(", such")[0] for message in caplog.messages] == [
        "model.num_layers_unfrozen (2): 12 weights were frozen in the model before and stay so",
        "model.num_layers_unfrozen (-1): 26 weights were frozen in the model before and stay so",
    ]
    lm.requires_grad_(True)
    assert {"block 0", "block 1", "block 2"} <= parts(LanguagePolicy(lm))


def test_tied_embeddings_are_frozen_and_untied_ones_are_not() -> None:
    tied = LanguagePolicy(sharp_lm("llama", tie_word_embeddings=True), num_layers_unfrozen=1)
    assert parts(tied) == {"block 2", "model.norm.weight"}
    untied = LanguagePolicy(sharp_lm("gpt2", tie_word_embeddings=False), num_layers_unfrozen=1)
    assert parts(untied) == {"block 2", *NORMS["gpt2"], "lm_head.weight"}


def test_loops_find_what_they_read_off_a_block() -> None:
    lm = sharp_lm("llama")
    for number, block in enumerate(blocks(lm)):
        setattr(block, "attention_type", f"type {number}")  # noqa: B010 mypy takes attributes of modules for tensors
    top = TopBlocks(lm, 2)
    assert [block.attention_type for block in top.base.layers] == ["type 0", "type 1", "type 2"]


def test_a_value_branch_of_blocks_that_take_keys_from_lower_ones_is_refused() -> None:
    words = r"method\.num_value_layers_unfrozen \(2\): blocks of Gemma3nForCausalLM read more .* Set it to 0"
    with pytest.raises(ConfigError, match=words):
        valued_policy(sharp_lm("gemma3n", layers=6), head_blocks={"value": 2})


def test_a_copy_that_computes_something_else_is_none() -> None:
    lm: Any = sharp_lm("llama")
    seen: list[torch.Tensor] = []
    blocks(lm)[0].register_forward_hook(lambda *of_block: seen.append(of_block[2]))
    blocks(lm)[2].register_forward_hook(lambda *of_block: of_block[2] + seen.pop() if seen else of_block[2])
    assert copied_top(lm, 2) is None
    assert copied_top(sharp_lm("llama"), 2) is not None


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
@pytest.mark.parametrize("unfrozen", [1, 2, 3, 7])
def test_trained_are_the_top_blocks_of_the_decoder(family: str, unfrozen: int) -> None:
    lm = sharp_lm(family)
    LanguagePolicy(lm, num_layers_unfrozen=unfrozen)
    trained = {name for name, parameter in lm.named_parameters() if parameter.requires_grad}
    prefix = "model.decoder.layers." if family == "bart" else "decoder.block."
    top = range(max(0, 3 - unfrozen), 3)
    assert {name for name in trained if name.startswith(prefix)} == {
        name for name, _ in lm.named_parameters() if any(name.startswith(f"{prefix}{n}.") for n in top)
    }
    norm = set() if family == "bart" else {"decoder.final_layer_norm.weight"}
    assert {name for name in trained if not name.startswith(prefix)} == norm


def test_experts_that_a_test_run_does_not_choose_are_frozen_as_well() -> None:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2}
    sizes |= {"num_decoder_layers": 2, "decoder_start_token_id": 1}
    sizes |= {"num_experts": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "dropout_rate": 0.0}
    config = SwitchTransformersConfig(vocab_size=32, **sizes)
    lm = AutoModelForSeq2SeqLM.from_config(config)
    policy = LanguagePolicy(lm, num_layers_unfrozen=1)
    assert parts(policy) == {"block 1", "decoder.final_layer_norm.weight"}


def test_a_head_of_its_own_is_trained_with_the_top() -> None:
    lm = sharp_lm("bart", tie_word_embeddings=False)
    policy = LanguagePolicy(lm, num_layers_unfrozen=1)
    policy.add_reference()
    assert lm.lm_head.weight.requires_grad
    assert not any(p.requires_grad for p in lm.get_encoder().parameters())
    out = policy(batch_of_ids(), reference=True)
    assert torch.equal(out.logprobs, out.ref_logprobs)
