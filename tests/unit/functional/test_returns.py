"""Generalised advantage estimation and discounted returns."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import LAYOUTS, QUICK, Batch, Layout, batches
from trlx_like.functional.returns import discounted_returns, gae

NAN = float("nan")
FRACTIONS = st.floats(0, 1, width=32)

REWARDS = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
VALUES = torch.tensor([[0.5, 1.0, 1.5], [1.0, NAN, 1e30]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_gae_golden() -> None:
    # gamma = lam = 1/2, so gamma lam = 1/4. First row, from the end:
    #   delta_3 = 3 + 0 - 1.5 = 1.5            A_3 = 1.5
    #   delta_2 = 2 + 0.5 * 1.5 - 1 = 1.75     A_2 = 1.75 + 1.5 / 4 = 2.125
    #   delta_1 = 1 + 0.5 * 1 - 0.5 = 1        A_1 = 1 + 2.125 / 4 = 1.53125
    # Second row, one token: delta_1 = 4 + 0 - 1 = 3. Returns are A + V.
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.53125, 2.125, 1.5], [3, 0, 0]]
    assert returns.tolist() == [[2.03125, 3.125, 3], [4, 0, 0]]


def test_discounted_returns_golden() -> None:
    # gamma = 1/2: G_3 = 3, G_2 = 2 + 1.5 = 3.5, G_1 = 1 + 1.75 = 2.75.
    assert discounted_returns(REWARDS, MASK, gamma=0.5).tolist() == [[2.75, 3.5, 3], [4, 0, 0]]


def test_empty_batches_and_responses() -> None:
    for shape in [(0, 3), (2, 0)]:
        advantages, returns = gae(torch.ones(shape), torch.ones(shape), torch.ones(shape, dtype=torch.bool), 1, 1)
        assert advantages.shape == returns.shape == shape


def gae_of(batch: Batch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    rewards, values = batch.fields
    return gae(rewards, values, batch.mask, gamma, lam)


@QUICK
@given(batches(2), FRACTIONS, FRACTIONS)
def test_equals_numpy(batch: Batch, gamma: float, lam: float) -> None:
    rewards, values, mask = batch.numpy()
    expected = reference.gae(rewards, values, mask, gamma, lam)
    got = gae_of(batch, gamma, lam)
    np.testing.assert_allclose(got[0].numpy(), expected[0], atol=1e-12)
    np.testing.assert_allclose(got[1].numpy(), expected[1], atol=1e-12)
    returns = discounted_returns(batch.fields[0], batch.mask, gamma)
    np.testing.assert_allclose(returns.numpy(), reference.discounted_returns(rewards, mask, gamma), atol=1e-12)


@QUICK
@given(batches(2), LAYOUTS, FRACTIONS, FRACTIONS)
def test_padding_changes_nothing(batch: Batch, layout: Layout, gamma: float, lam: float) -> None:
    other = layout(batch)
    for got, expected in zip(gae_of(other, gamma, lam), gae_of(batch, gamma, lam), strict=True):
        assert torch.equal(got[other.mask], expected[batch.mask])
        assert (got[~other.mask] == 0).all()


@QUICK
@given(batches(2), FRACTIONS)
def test_rows_do_not_meet(batch: Batch, gamma: float) -> None:
    whole = gae_of(batch, gamma, 0.9)[0]
    for row in range(len(batch.mask)):
        alone = batch.rows(slice(row, row + 1))
        assert torch.equal(gae_of(alone, gamma, 0.9)[0], whole[row : row + 1])


@QUICK
@given(batches(2), FRACTIONS)
def test_returns_at_lambda_one_do_not_depend_on_the_values(batch: Batch, gamma: float) -> None:
    rewards, values = batch.fields
    returns = gae(rewards, values, batch.mask, gamma, 1.0)[1]
    torch.testing.assert_close(returns, discounted_returns(rewards, batch.mask, gamma), rtol=1e-6, atol=1e-9)
