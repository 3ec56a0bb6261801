"""Models whose weights stay in their files: what is read later is what a whole load has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel

from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES, save_tiny, tiny_config
from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Unread
from trlx_like.models.loading import load_model, load_trained_model
from trlx_like.models.unread import lowest_blocks


def config(path: object, kind: str = "causal", **more: object) -> ModelConfig:
    return ModelConfig(model_path=path, model_arch_type=kind, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*FAMILIES, *ODD_FAMILIES, *SEQ2SEQ_FAMILIES])
def test_weights_and_buffers_are_those_of_a_whole_load(family: str, tmp_path: Path) -> None:
    options = config(save_tiny(tmp_path, family), "seq2seq" if family in SEQ2SEQ_FAMILIES else "causal")
    whole, left = (load_model(options.model_path, options, unread=unread) for unread in (False, True))
    assert list(left.state_dict()) == list(whole.state_dict())
    expected, buffers = dict(whole.named_parameters(remove_duplicate=False)), dict(whole.named_buffers())
    for name, weight in left.named_parameters(remove_duplicate=False):
        assert isinstance(weight, Unread) and weight.untyped_storage().nbytes() == 4
        assert torch.equal(weight.saved.read(0, weight.numel()).view(weight.shape), expected[name])
    assert {name: value.tolist() for name, value in left.named_buffers()} == {
        name: value.tolist() for name, value in buffers.items()
    }
    assert len(list(left.parameters())) == len(list(whole.parameters()))  # ties are kept


def test_a_range_is_read_from_the_rows_that_have_it(tmp_path: Path) -> None:
    """A table of 32 rows of 16 numbers: numbers 20 to 50 are in rows 1 to 3."""
    options = config(save_tiny(tmp_path), dtype="bfloat16", num_layers_unfrozen=0)
    weight = load_model(options.model_path, options, unread=True).get_input_embeddings().weight
    assert isinstance(weight, Unread) and weight.dtype == torch.bfloat16
    table = load_file(tmp_path / "model.safetensors")["transformer.wte.weight"].bfloat16()
    assert torch.equal(weight.saved.read(20, 50), table.flatten()[20:50])
    assert weight.saved.read(512, 512).shape == (0,)


def test_a_model_is_tried_with_its_lowest_blocks(tmp_path: Path) -> None:
    options = config(save_tiny(tmp_path, layers=3))
    whole, left = (load_model(options.model_path, options, unread=unread) for unread in (False, True))
    assert lowest_blocks(whole, 1) is whole
    small: Any = lowest_blocks(left, 1)
    assert len(set(small.transformer.h)) == 1 and small.lm_head.weight is small.transformer.wte.weight
    assert not any(isinstance(weight, Unread) for weight in small.parameters())
    ids = torch.arange(5)[None]
    body: Any = whole.transformer
    body.h[1] = body.h[2] = body.h[0]
    assert torch.equal(small(ids).logits, whole(ids).logits)


def test_a_new_adapter_is_that_of_a_whole_load(tmp_path: Path) -> None:
    options = config(save_tiny(tmp_path), peft_config={"peft_type": "LORA", "r": 2})
    found = []
    for unread in (False, True):
        torch.manual_seed(0)
        lm = load_trained_model(options, unread)
        found.append({name: weight.tolist() for name, weight in lm.named_parameters() if weight.requires_grad})
        assert all(isinstance(w, Unread) == unread for w in lm.parameters() if not w.requires_grad)
    assert found[0] == found[1] != {}


def test_what_is_not_in_safetensors_is_read_whole_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "bin")
    file = tmp_path / "bin" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    caplog.set_level("INFO")
    for path, words in (
        (str(tmp_path / "bin"), "not in files of safetensors"),
        (tiny_config(), "random, quantized or those of an adapter"),
    ):
        lm = load_model(path, config(path), unread=True)
        assert not any(isinstance(weight, Unread) for weight in lm.parameters())
        assert words in caplog.text
    dora = config(save_tiny(tmp_path / "dora"), peft_config={"peft_type": "LORA", "use_dora": True})
    assert not any(isinstance(weight, Unread) for weight in load_trained_model(dora, True).parameters())


def test_a_weight_that_is_not_finite_is_refused_when_it_is_read(tmp_path: Path) -> None:
    options = config(save_tiny(tmp_path, layers=2))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "transformer.h.1.mlp.c_fc.weight"
    weights[name][3, 5] = torch.inf
    save_file(weights, file, {"format": "pt"})
    lm = load_model(options.model_path, options, unread=True)
    weight = lm.get_parameter(name)
    assert isinstance(weight, Unread)
    assert weight.saved.read(0, 3 * 64).isfinite().all()
    with pytest.raises(ConfigError, match=r"the weight transformer.h.1.mlp.c_fc.weight has NaN or infinite values"):
        weight.saved.read(3 * 64, 4 * 64)


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    sizes: Any = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    made = BertLMHeadModel(BertConfig(vocab_size=32, architectures=["BertLMHeadModel"], **sizes))
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BertLMHeadModel is not causal"):
        load_model(str(tmp_path), config(str(tmp_path)), unread=True)
