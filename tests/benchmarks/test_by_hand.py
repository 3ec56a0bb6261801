"""The passes of GPT-2 by hand compute what modules and autograd compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.by_hand import ByHand, by_modules, rank_by_modules


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=48, n_head=2, vocab_size=61, n_positions=24)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return GPT2LMHeadModel(config)


def gradients(lm: Any, run: Callable[[], None]) -> dict[str, Tensor]:
    lm.zero_grad()
    run()
    return {name: weight.grad.clone() for name, weight in lm.named_parameters()}


@pytest.mark.parametrize("work", ["learn", "rank"])
def test_gradients_equal_those_of_autograd(work: str) -> None:
    lm, ids, head = gpt2(), torch.randint(61, (3, 14)), nn.Parameter(torch.randn(1, 48))
    hand = ByHand(lm)
    modules, own = {
        "learn": (lambda: by_modules(lm, ids, 5), lambda: hand.learn(ids, 5)),
        "rank": (lambda: rank_by_modules(lm, ids, head), lambda: hand.rank(ids, head)),
    }[work]
    expected, found = gradients(lm, modules), gradients(lm, own)
    assert any(grad.abs().max() > 1e-3 for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_decoded_tokens_have_the_probabilities_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's probabilities are those of a whole pass over the prompt and the tokens drawn so far."""
    lm, ids = gpt2().eval(), torch.randint(61, (3, 9))
    seen: list[Tensor] = []
    draw = Tensor.multinomial

    def noted(self: Tensor, count: int) -> Tensor:
        seen.append(self)
        return draw(self, count)

    monkeypatch.setattr(Tensor, "multinomial", noted)
    drawn = ByHand(lm).decode(ids, 6)
    with torch.no_grad():
        whole = lm(torch.cat([ids, drawn], 1)).logits[:, 8:-1].softmax(-1)
    torch.testing.assert_close(torch.stack(seen, 1), whole, rtol=1e-4, atol=1e-6)
