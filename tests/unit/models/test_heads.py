"""Heads on hidden states."""

from __future__ import annotations

import torch

from tests.unit.models.support import linear
from trlx_like.models.heads import ValueHead


def test_values_golden() -> None:
    # One unit a layer that is not zero: relu(2 x0 - 1) * 3 + 0.5. For x0 = 1: 3.5; for x0 = 0: 0.5.
    head = ValueHead(2)
    first, second = linear(head.layers, 0), linear(head.layers, 2)
    for layer in (first, second):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    with torch.no_grad():
        first.weight[0, 0], first.bias[0] = 2.0, -1.0
        second.weight[0, 0], second.bias[0] = 3.0, 0.5
    assert head(torch.tensor([[[1.0, 7.0], [0.0, 7.0]]])).tolist() == [[3.5, 0.5]]


def test_the_head_stays_in_float32() -> None:
    torch.manual_seed(0)
    head, hidden = ValueHead(4), torch.randn(5, 4)
    torch.nn.init.normal_(linear(head.layers, 2).weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(head(hidden), head.layers(hidden).squeeze(-1))
        values = head(hidden)
    assert values.dtype == torch.float32 and torch.equal(values, head(hidden))
    assert head(hidden.bfloat16()).dtype == torch.float32
