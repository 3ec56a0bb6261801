"""The value head, and the model with one that TRL's users know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import FAMILIES, tiny_lm
from tests.unit.models.support import batch_of_ids, linear, sharp_lm, valued_policy
from trlx_like.errors import ConfigError
from trlx_like.models import HEADS_FILE, AutoModelForCausalLMWithValueHead, ValueHead


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "opt_projected"])
def test_logits_and_values(family: str) -> None:
    lm, batch = sharp_lm(family), batch_of_ids()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(lm)
    policy = valued_policy(lm)
    head = policy.heads["value"]
    assert isinstance(head, ValueHead)
    model.v_head = head
    inputs = batch.inputs()
    with torch.no_grad():
        logits, loss, values = model(inputs["input_ids"], inputs["attention_mask"])
        expected = lm(**inputs).logits
    assert loss is None and values.shape == inputs["input_ids"].shape
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], rtol=0, atol=1e-5)
    mask = torch.cat([torch.ones(3, 1).bool(), batch.mask], dim=1)
    torch.testing.assert_close(values[:, -7:][mask], policy(batch).heads["value"].detach()[mask], rtol=0, atol=1e-5)
    alone = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(model(alone)[0], lm(alone).logits, rtol=0, atol=1e-5)


def test_save_and_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lm = sharp_lm("llama")
    model = AutoModelForCausalLMWithValueHead(lm)
    torch.nn.init.normal_(linear(model.v_head.layers, 2).weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert capfd.readouterr().err == ""
    ids = torch.tensor([[3, 4, 5]])
    for one, other in zip(model(ids)[::2], again(ids)[::2], strict=True):
        assert torch.equal(one, other)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(plain(ids).logits, lm(ids).logits)


def test_heads_of_a_trainer(tmp_path: Path) -> None:
    tiny_lm().save_pretrained(tmp_path)
    torch.manual_seed(0)
    head = ValueHead(16)
    torch.nn.init.normal_(linear(head.layers, 2).weight)
    saved = {f"heads.value.{name}": part for name, part in head.state_dict().items()}
    save_file({**saved, "heads.other.weight": torch.ones(1)}, tmp_path / HEADS_FILE)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    hidden = torch.randn(3, 16)
    assert torch.equal(model.v_head(hidden), head(hidden))
    save_file({"heads.other.weight": torch.ones(1)}, tmp_path / HEADS_FILE)
    fresh = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).v_head(hidden)
    assert torch.isfinite(fresh).all() and not torch.equal(fresh, head(hidden))
    save_file({**saved, "head_tops.value.base.h.0.weight": torch.ones(1)}, tmp_path / HEADS_FILE)
    with pytest.raises(
        ConfigError, match=r"heads\.safetensors has a value branch \(method\.num_value_layers_unfrozen\)"
    ):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_heads_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    AutoModelForCausalLMWithValueHead(tiny_lm()).save_pretrained(tmp_path)
    assert set(load_file(tmp_path / HEADS_FILE)) == {
        f"heads.value.layers.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }


def test_generate() -> None:
    lm: Any = tiny_lm()
    model = AutoModelForCausalLMWithValueHead(lm)
    ids = torch.tensor([[3, 4]])
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 1}
    assert torch.equal(model.generate(ids, **options), lm.generate(ids, **options))
