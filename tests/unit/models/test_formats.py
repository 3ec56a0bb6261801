"""Number formats of weights: what is refused before a model loads, and what quantized layers become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.tiny import save_tiny, tiny_config, tiny_lm
from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.models.formats import check_formats, is_quantized, plain_layer
from trlx_like.models.loading import check_model, load_model, load_trained_model
from trlx_like.models.merging import merged, mismerged_weights, plain_weights
from trlx_like.models.reward_model import load_reward_model

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "init_lora_weights": False}
IDS = torch.arange(3, 23)[None]


def config_of(path: Any, **options: Any) -> ModelConfig:
    return ModelConfig(model_path=path, **options)


def quantized(folder: Path, name: str, family: str = "gpt2", **options: Any) -> PreTrainedModel:
    """A tiny model with a LoRA that changes its outputs, on quantized weights."""
    pytest.importorskip("bitsandbytes")
    path = save_tiny(folder / family, family)
    return load_trained_model(config_of(path, **{"quantization": name, "peft_config": LORA, **options})).eval()


@torch.no_grad()
def logits(lm: nn.Module) -> torch.Tensor:
    return lm(IDS).logits


# What is refused before a model loads.


def test_quantized_weights_need_an_adapter_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model.quantization \('nf4'\): quantized weights cannot be tr"):
        check_model(config_of(save_tiny(tmp_path), quantization="nf4"))
    with pytest.raises(ConfigError, match=r"^model.quantization \('int8'\) needs saved weights, and GPT2C"):
        load_model(tiny_config(), config_of(tiny_config(), quantization="int8", peft_config=LORA))
    with pytest.raises(ConfigError, match=r"^model.quantization \('nf4'\): a model in memory is used as it is"):
        load_model(tiny_lm(), config_of(tiny_lm(), quantization="nf4", peft_config=LORA))


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r'^model.quantization \(.nf4.\) needs bits.* pip install -e "\.\[bitsandb'):
        check_formats(config_of(tiny_config(), quantization="nf4", peft_config=LORA))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_arch_type": "diffusion", "peft_config": LORA}, "'nf4' is for language models"),
        ({"peft_config": {"peft_type": "IA3"}}, "goes with an adapter of peft_type LORA, not IA3"),
        ({"peft_config": LORA, "model_extra_configs": {"quantization_config": {}}}, "leave one out"),
    ],
)
def test_what_quantization_does_not_go_with(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.quantization: .*{words}"):
        ModelConfig(model_path="a", quantization="nf4", **options)


def test_weights_of_16_bits_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    """Unless they stay as they are: beside an adapter, or beside heads."""
    path = save_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"^model.dtype \('float16'\): weights that are trained need fl.*: fp16,"):
        check_formats(config_of(path, dtype="float16"))
    for fine in ({"peft_config": LORA}, {"num_layers_unfrozen": 0}):
        check_formats(config_of(path, dtype="float16", **fine))
    with pytest.raises(ConfigError, match=r"^model.dtype \('float16'\): a model in memory is used as it is, and this"):
        load_model(tiny_lm(), config_of(tiny_lm(), dtype="float16"))


def test_auto_is_the_format_of_the_files_or_of_the_configuration(tmp_path: Path) -> None:
    tiny_lm().bfloat16().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), config_of(str(tmp_path), dtype="auto")).dtype == torch.bfloat16
    assert load_model(tiny_config(), config_of(tiny_config(), dtype="auto")).dtype == torch.float32
    half = tiny_config(dtype=torch.float16)
    assert load_model(half, config_of(half, dtype="auto")).dtype == torch.float16


# With bitsandbytes.


@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_merged_copy_is_a_plain_model_that_computes_the_same(name: str, family: str, tmp_path: Path) -> None:
    """It is not quantized again, and loads in plain transformers."""
    lm = quantized(tmp_path, name, family)
    assert any(map(is_quantized, lm.modules())) and not is_quantized(lm.get_output_embeddings())
    whole = merged(lm)
    assert not any(map(is_quantized, whole.modules()))
    # int8 rounds activations as well, to one of 127 steps.
    tolerance = 2e-6 if name == "nf4" else 0.02
    torch.testing.assert_close(logits(whole), logits(lm), rtol=0, atol=tolerance)
    assert (logits(whole) - logits(tiny_lm(family))).abs().max() > 10 * tolerance
    whole.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(again.config, "quantization_config")
    torch.testing.assert_close(logits(again.eval()), logits(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_plain_weights_are_those_of_the_merged_copy(name: str, tmp_path: Path) -> None:
    lm = quantized(tmp_path, name)
    expected, got = dict(merged(lm).named_parameters()), dict(plain_weights(lm))
    assert list(got) == list(expected)
    for weight, value in expected.items():
        assert torch.equal(got[weight], value), weight
    other = {(weight, cause): value for weight, cause, value in mismerged_weights(lm)}
    weight = "transformer.h.0.attn.c_attn.weight"
    delta = got[weight] - other[weight, "without the adapter"]
    assert delta.abs().max() > 0
    torch.testing.assert_close(other[weight, "with the adapter twice"] - got[weight], delta, rtol=0, atol=1e-6)


def test_a_plain_layer_has_the_class_and_the_format_that_it_had_before(tmp_path: Path) -> None:
    lm = quantized(tmp_path, "nf4", dtype="bfloat16")
    layer = lm.get_submodule("transformer.h.0.mlp.c_fc")
    x = torch.randn(5, 16, generator=torch.manual_seed(0)).bfloat16()
    plain = plain_layer(layer, torch.bfloat16)
    assert isinstance(plain, Conv1D) and {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert torch.equal(plain(x), layer(x))
    assert layer.compute_dtype == torch.bfloat16


def test_the_head_of_a_reward_model_is_trained_in_float32(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    path = save_tiny(tmp_path)
    options = config_of(path, quantization="nf4", dtype="bfloat16", peft_config=LORA)
    lm = load_reward_model(path, config=options)
    assert any(map(is_quantized, lm.modules())) and not is_quantized(lm.score)
    with pytest.raises(ConfigError, match="quantized weights cannot be trained themselves"):
        load_reward_model(path, config=config_of(path, quantization="nf4"))


def test_files_that_are_quantized_already_need_an_adapter_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = config_of(save_tiny(tmp_path / "a"), quantization="nf4", peft_config=LORA)
    load_model(options.model_path, options).save_pretrained(tmp_path / "b")
    path = str(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"^model.model_path: quantized weights cannot be trained themselves"):
        load_trained_model(config_of(path))
    lm = load_trained_model(config_of(path, peft_config=LORA))
    assert {layer.support_avx512bf16_for_cpu for layer in lm.modules() if is_quantized(layer)} == {False}
    with pytest.raises(ConfigError, match=r"^model.quantization \('int8'\): GPT2LMHeadModel has no layer in this form"):
        load_trained_model(config_of(path, quantization="int8", peft_config=LORA))
