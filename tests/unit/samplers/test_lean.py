"""Calls of modules while decoding: less of torch, the same results, and a model that is afterwards as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_lm
from tests.unit.samplers.scripted import prompts, sampler
from trlx_like.samplers.lean import lean

IDS = torch.arange(12).view(2, 6)


def state(lm: nn.Module) -> list[tuple[type, set[str]]]:
    return [(type(module), set(vars(module))) for module in lm.modules()]


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_a_model_computes_the_same_and_is_then_as_it_was(family: str) -> None:
    lm: Any = tiny_lm(family).eval()
    before, names = state(lm), list(lm.state_dict())
    right = lm(IDS).logits
    with pytest.raises(KeyboardInterrupt), lean(lm):
        assert torch.equal(lm(IDS).logits, right) and list(lm.state_dict()) == names
        raise KeyboardInterrupt
    assert state(lm) == before and torch.equal(lm(IDS).logits, right)


def test_a_step_of_decoding_calls_modules_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, calls = tiny_lm("gpt2"), list[str]()
    whole = nn.Module._call_impl

    def count(self: nn.Module, *args: Any, **given: Any) -> Any:
        calls.append(type(self).__name__)
        return whole(self, *args, **given)

    monkeypatch.setattr(nn.Module, "_call_impl", count)
    sampler(lm=lm).sample(prompts(["ab"]), {"max_new_tokens": 3, "eos_token_id": None}, 1)
    # The head has a hook while decoding.
    assert calls == ["GPT2LMHeadModel", "GPT2Model", type(lm.get_output_embeddings()).__name__] * 3


def test_hooks_run_and_a_new_weight_is_used() -> None:
    lm: Any = tiny_lm("llama").eval()
    seen: list[str] = []
    block = lm.model.layers[0]
    handle = block.mlp.register_forward_pre_hook(lambda *_: seen.append("mlp"))
    with lean(lm):
        lm(IDS)
        block.self_attn.q_proj.weight = nn.Parameter(torch.zeros_like(block.self_attn.q_proj.weight))
        changed = lm(IDS).logits
    handle.remove()
    assert seen == ["mlp", "mlp"] and torch.equal(lm(IDS).logits, changed)
    every = register_module_forward_pre_hook(lambda module, _: seen.append(type(module).__name__))
    with lean(lm):
        lm(IDS)
    every.remove()
    assert seen.count("LlamaMLP") == len(lm.model.layers)


@pytest.mark.parametrize("kind", ["instance", "class", "weight"])
def test_a_module_that_is_called_in_a_way_of_its_own_is_left_alone(kind: str) -> None:
    class Twice(nn.Linear):
        def __call__(self, states: Tensor) -> Any:
            return 2 * super().__call__(states)

    class Part(nn.Parameter):
        """A weight of another class, which a backend may replace at each call."""

    lm: Any = tiny_lm("llama").eval()
    head = lm.lm_head
    if kind == "class":
        head.__class__ = Twice
    elif kind == "weight":
        head.weight = Part(head.weight.detach())
        with lean(lm):
            assert type(head) is nn.Linear
    else:
        once = head.forward
        head.forward = lambda states: 2 * once(states)
    right = lm(IDS).logits
    with lean(lm):
        assert torch.equal(lm(IDS).logits, right)
