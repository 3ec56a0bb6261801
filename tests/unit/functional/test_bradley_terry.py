"""The loss of a pair by hand, against float64 numpy, and by what must hold of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional.properties import QUICK
from trlx_like.functional.bradley_terry import bradley_terry_loss, off_center, pair_loss

REWARDS = st.floats(-30, 30)


def pairs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden() -> None:
    # r_c - r_r = 0: log 2. log 3: sigmoid is 3/4. log 3 with margin log 3: sigmoid(0). -log 3: sigmoid is 1/4.
    three = math.log(3)
    loss = bradley_terry_loss(pairs(0.5, three, three, 0.0), pairs(0.5, 0.0, 0.0, three), pairs(0, 0, three, 0))
    expected = [math.log(2), math.log(4 / 3), math.log(2), math.log(4)]
    assert loss.tolist() == pytest.approx(expected)
    # (1 + -1)^2, (2 + 1)^2.
    assert off_center(pairs(1, 2), pairs(-1, 1)).tolist() == [0.0, 9.0]


@QUICK
@given(st.lists(st.tuples(REWARDS, REWARDS, st.floats(-2, 2)), min_size=1, max_size=5))
def test_against_numpy(rows: list[tuple[float, float, float]]) -> None:
    chosen, rejected, margin = np.array(rows).T
    probability = 1 / (1 + np.exp(-(chosen - rejected - margin)))
    columns = (torch.from_numpy(column.copy()) for column in (chosen, rejected, margin))
    np.testing.assert_allclose(bradley_terry_loss(*columns).numpy(), -np.log(probability), rtol=1e-9, atol=1e-12)


@QUICK
@given(REWARDS, REWARDS, st.floats(-5, 5))
def test_only_the_difference_counts_and_centering_fixes_the_level(first: float, second: float, shift: float) -> None:
    chosen, rejected = pairs(first).requires_grad_(), pairs(second).requires_grad_()
    shifted = bradley_terry_loss(pairs(first + shift), pairs(second + shift))
    loss = bradley_terry_loss(chosen, rejected)
    torch.testing.assert_close(shifted, loss.detach(), rtol=1e-9, atol=1e-9)
    (loss + off_center(chosen, rejected)).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    # The preference pushes both apart by the same amount; centering moves both by the same.
    torch.testing.assert_close(chosen.grad + rejected.grad, 4 * pairs(first + second), rtol=1e-9, atol=1e-9)


def test_no_reward_is_too_large() -> None:
    loss = bradley_terry_loss(torch.tensor([-1e4, 1e4]), torch.tensor([1e4, -1e4]))
    assert loss.tolist() == [2e4, 0.0]


def test_the_loss_was_called_pair_loss() -> None:
    assert pair_loss is bradley_terry_loss
