"""Merging of adapters: the copy says the same, its weights are the plain ones, and what may go wrong is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_lm
from tests.unit.models.support import (
    batch_of_ids,
)
from tests.unit.models.test_adapters import KINDS, adapted, every_kind, move
from trlx_like.models.adapters import add_adapter
from trlx_like.models.export import save_model
from trlx_like.models.merging import merged, mismerged_weights, plain_weights
from trlx_like.models.policy import LanguagePolicy


@every_kind
def test_the_plain_weights_are_those_of_the_merged_model(family: str, options: dict[str, Any]) -> None:
    """Bit by bit, and neither they nor what they might be by mistake change the model."""
    lm = adapted(family, options)
    move(LanguagePolicy(lm))
    before = {name: weight.clone() for name, weight in lm.named_parameters()}
    plain, whole = dict(plain_weights(lm)), dict(merged(lm).named_parameters())
    assert set(plain) == set(whole)
    assert all(torch.equal(weight, whole[name]) for name, weight in plain.items())
    mistakes = {(name, cause): weight for name, cause, weight in mismerged_weights(lm)}
    assert bool(mistakes) or "modules_to_save" in options
    assert {name for name, _ in mistakes} <= set(whole)
    assert all(torch.equal(weight, before[name]) for name, weight in lm.named_parameters())


def test_what_a_merge_may_do_wrong_by_hand() -> None:
    """W is 1, B A is 2 x 3 x 0.5 (alpha / r): 1 left out, 4 added once, 7 twice."""
    lm = tiny_lm("llama", layers=1)
    add_adapter(lm, {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": ["q_proj"]}, None)
    layer = lm.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.weight.fill_(1)
        for part, value in ((layer.lora_A.default, 2), (layer.lora_B.default, 3)):
            part.weight.zero_()
            part.weight[:, 0 if part is layer.lora_B.default else slice(None)] = value
        layer.lora_A.default.weight[1] = 0
    name = "model.layers.0.self_attn.q_proj.weight"
    assert dict(plain_weights(lm))[name].unique().tolist() == [4]
    found = {(name, cause): weight.unique().tolist() for name, cause, weight in mismerged_weights(lm)}
    assert found == {(name, "without the adapter"): [1], (name, "with the adapter twice"): [7]}


@every_kind
def test_merged_it_says_the_same(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    lm = adapted(family, options)
    policy = LanguagePolicy(lm)
    move(policy)
    whole = merged(lm)
    assert type(whole) is type(lm)
    names = [name for name, _ in tiny_lm(family, layers=3).named_parameters()]
    if (family, options) in [kind for name, kind in KINDS.items() if name.startswith("tied")]:
        names.append("lm_head.weight")  # no longer that of the embeddings
    assert [name for name, _ in whole.named_parameters()] == names
    batch = batch_of_ids()
    with torch.no_grad():
        expected = policy(batch).logprobs
        torch.testing.assert_close(LanguagePolicy(whole)(batch).logprobs, expected, rtol=0, atol=2e-4)
        assert torch.equal(policy(batch).logprobs, expected)  # the model itself is as it was
    save_model(lm, tmp_path, merge=True)
    read = type(lm).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(LanguagePolicy(read)(batch).logprobs, LanguagePolicy(whole)(batch).logprobs)
