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
from trlx_like.models.heads import ValueHead
from trlx_like.models.saved_heads import HEADS_FILE
from trlx_like.models.value_head import AutoModelForCausalLMWithValueHead


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
    assert set(load_file(tmp_path / HEADS_FILE)) == {f"heads.value.summary.{part}" for part in ("weight", "bias")}


def test_generate() -> None:
    lm: Any = tiny_lm()
    model = AutoModelForCausalLMWithValueHead(lm)
    ids = torch.tensor([[3, 4]])
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 1}
    assert torch.equal(model.generate(ids, **options), lm.generate(ids, **options))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "opt"])
def test_forward_takes_what_the_model_takes(family: str) -> None:
    lm = sharp_lm(family)
    model = AutoModelForCausalLMWithValueHead(lm).eval()
    ids = torch.tensor([[1, 1, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        logits, loss, values = model(ids, mask, labels=labels)
        picked = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        by_hand = torch.tensor([float(picked[0, row]) for row in (1, 2, 3)] + picked[1].tolist())  # two are of padding
        assert float(loss) == pytest.approx(-float(by_hand.mean()), abs=1e-5)
        embedded = model(None, mask, inputs_embeds=lm.get_input_embeddings()(ids))
        torch.testing.assert_close(embedded[0], logits)
        first = model(ids[:, :3], mask[:, :3], return_past_key_values=True)
        assert len(first) == 4
        rest = model(ids[:, 3:], mask, past_key_values=first[3])
        torch.testing.assert_close(rest[0], logits[:, 3:], rtol=0, atol=1e-4)
        torch.testing.assert_close(rest[2], values[:, 3:], rtol=0, atol=1e-4)


def test_position_ids_are_those_that_are_given() -> None:
    lm = sharp_lm("gpt2")
    model = AutoModelForCausalLMWithValueHead(lm)
    ids, positions = torch.tensor([[3, 4, 5]]), torch.tensor([[4, 2, 9]])
    with torch.no_grad():
        expected = lm(input_ids=ids, position_ids=positions).logits
        assert torch.equal(model(ids, torch.ones_like(ids), position_ids=positions)[0], expected)
        assert not torch.equal(model(ids)[0], expected)


def test_a_new_head() -> None:
    torch.manual_seed(0)
    wide = AutoModelForCausalLMWithValueHead(
        tiny_lm(n_embd=512), v_head_init_strategy="normal", v_head_initializer_range=0.3, summary_dropout_prob=0.5
    ).train()
    weight = wide.state_dict()["v_head.summary.weight"]
    assert float(weight.std()) == pytest.approx(0.3, rel=0.1) and wide.state_dict()["v_head.summary.bias"] == 0
    hidden = torch.ones(200, 512)
    assert float(wide.v_head(hidden).detach().std()) > 1  # half of 512 terms of 2 x 0.3: about 6.8
    assert float(wide.eval().v_head(hidden).detach().std()) < 1e-3
    default = AutoModelForCausalLMWithValueHead(tiny_lm(n_embd=512)).train()
    assert default.state_dict()["v_head.summary.weight"].abs().max() <= 512**-0.5  # torch's own
    assert torch.equal(default.v_head(hidden), default.v_head(hidden))
