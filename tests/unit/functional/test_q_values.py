"""Q-values of taken actions, in chunks: by hand, and equal to the whole table at once with its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trlx_like.functional.q_learning import conservative_loss
from trlx_like.functional.q_values import action_values, action_values_and_conservative_loss


def test_by_hand() -> None:
    # Q of the state [1, 0] is the first column of the weights, of [0, 2] twice the second.
    head = nn.Linear(2, 3, bias=False)
    head.weight.data = torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
    states, actions = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([2, 0])
    assert action_values(states, actions, head).tolist() == [3, 8]
    q, loss = action_values_and_conservative_loss(states, actions, head)
    assert q.tolist() == [3, 8]
    # logsumexp(1, 2, 3) - 3 = ln(1 + e^-1 + e^-2); logsumexp(8, 10, 12) - 8 = 4 + ln(1 + e^-2 + e^-4).
    by_hand = [math.log(1 + math.exp(-1) + math.exp(-2)), 4 + math.log(1 + math.exp(-2) + math.exp(-4))]
    assert loss.tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize("chunk_elements", [1, 14, 35, 1000])
def test_chunks_change_neither_numbers_nor_gradients(chunk_elements: int) -> None:
    torch.manual_seed(0)
    head, states, actions = nn.Linear(4, 7).double(), torch.randn(5, 4).double(), torch.tensor([0, 3, 6, 3, 1])

    def gradients(*losses: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(torch.stack(losses).sum(), [states, *head.parameters()]))

    states.requires_grad_()
    table = head(states)
    taken, loss = table[range(5), actions], conservative_loss(table, actions, 0.5)
    got, got_loss = action_values_and_conservative_loss(states, actions, head, 0.5, chunk_elements)
    torch.testing.assert_close((got, got_loss), (taken, loss))
    torch.testing.assert_close(gradients(got, got_loss), gradients(taken, loss))
    torch.testing.assert_close(action_values(states, actions, head, chunk_elements), taken)
