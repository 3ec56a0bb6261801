"""The value head, and the model with one that TRL's users know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import FAMILIES, tiny_lm
from tests.unit.models.support import batch_of_ids, sharp_lm, valued_policy
from trlx_like.errors import ConfigError
from trlx_like.models import HEADS_FILE, AutoModelForCausalLMWithValueHead, ValueHead


def test_values_golden() -> None:
    # One unit a layer that is not zero: relu(2 x0 - 1) * 3 + 0.5. For x0 = 1: 3.5; for x0 = 0: 0.5.
    head = ValueHead(2)
    for layer in (head.layers[0], head.layers[2]):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    with torch.no_grad():
        head.layers[0].weight[0, 0], head.layers[0].bias[0] = 2.0, -1.0
        head.layers[2].weight[0, 0], head.layers[2].bias[0] = 3.0, 0.5
    assert head(torch.tensor([[[1.0, 7.0], [0.0, 7.0]]])).tolist() == [[3.5, 0.5]]


def test_the_head_stays_in_float32() -> None:
    torch.manual_seed(0)
    head, hidden = ValueHead(4), torch.randn(5, 4)
    torch.nn.init.normal_(head.layers[2].weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(head(hidden), head.layers(hidden).squeeze(-1))
        values = head(hidden)
    assert values.dtype == torch.float32 and torch.equal(values, head(hidden))
    assert head(hidden.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "opt_projected"])
def test_logits_and_values(family: str) -> None:
    lm, batch = sharp_lm(family), batch_of_ids()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(lm)
    policy = valued_policy(lm)
    model.v_head = policy.heads["value"]
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
    torch.nn.init.normal_(model.v_head.layers[2].weight)
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
    torch.nn.init.normal_(head.layers[2].weight)
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
    lm = tiny_lm()
    model = AutoModelForCausalLMWithValueHead(lm)
    ids = torch.tensor([[3, 4]])
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 1}
    assert torch.equal(model.generate(ids, **options), lm.generate(ids, **options))
