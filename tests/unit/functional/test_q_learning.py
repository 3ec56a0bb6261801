"""ILQL's loss terms and decoding rule: by hand, against loops, and whatever the padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional import q_learning_numpy as reference
from tests.unit.functional.properties import (
    LAYOUTS,
    NUMBERS,
    QUICK,
    Batch,
    Formula,
    Layout,
    batches,
    check_padding_is_silent,
    check_rows_add_up,
    splits,
)
from tests.unit.functional.q_learning_numpy import LN2, Worked
from tests.unit.functional.reference_numpy import discounted_returns, elementwise
from trlx_like.functional import q_learning as ql
from trlx_like.functional.masked import masked_sum, zero_padding

NAN = float("nan")
FRACTIONS = st.floats(0, 1, width=32)
TAUS = st.sampled_from([0.5, 0.7, 0.99])

FORMULAS: dict[str, tuple[Formula, int]] = {
    "td_loss": (ql.td_loss, 2),
    "expectile_loss": (partial(ql.expectile_loss, tau=0.7), 2),
    "awac_weights": (partial(ql.awac_weights, beta=0.5, clip=3.0), 2),
}


def taken(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return q.gather(-1, ids[..., None]).squeeze(-1)


def test_the_four_terms_of_a_worked_example() -> None:
    """As a trainer does it: `Worked` has the numbers by hand."""
    case = Worked()
    next_values, continues = ql.next_action_values(case.values, case.action)
    assert next_values.tolist() == [[2, 0, 3, 0], [4, 0, 0, 0]]
    assert continues.tolist() == [[True, False, True, False], [True, False, False, False]]
    targets = ql.q_targets(case.rewards, next_values, case.gamma, continues)
    torch.testing.assert_close(targets[case.action], case.targets[case.action])

    values = case.values[:, :-1]
    target_q = torch.minimum(*(taken(q, case.ids) for q in case.target_q))
    q_loss = sum(masked_sum(ql.td_loss(taken(q, case.ids), targets), case.action) for q in case.q)
    v_loss = masked_sum(ql.expectile_loss(target_q, values, case.tau), case.action)
    actions = case.ids[case.action]
    cql_loss = sum(ql.conservative_loss(q[case.action], actions, case.cql_temperature).sum() for q in case.q)
    weights = ql.awac_weights(target_q, values, case.beta)
    awac_loss = masked_sum(-weights * case.logprobs, case.action)
    torch.testing.assert_close(weights[case.action], case.weights[case.action])
    got = torch.stack([torch.as_tensor(loss) for loss in (q_loss, v_loss, cql_loss, awac_loss)])
    torch.testing.assert_close(got, torch.tensor([14.0, 1.25, 12 * LN2, 6 * LN2]))
    assert (case.q_loss, case.v_loss, case.cql_loss, case.awac_loss) == (14.0, 1.25, 12 * LN2, 6 * LN2)

    returns = ql.monte_carlo_returns(case.rewards, case.action, case.gamma)
    assert returns.tolist() == case.returns.tolist()


def test_gradients_reach_q_and_v_and_no_target() -> None:
    # d td / dQ = 2 (Q - y): 2 (3 - 1) = 4. d expectile / dV = -2 w (target - V): for target 2, V 1: -2 * .9;
    # for target 0, V 1: 2 * .1.
    q, target, values = (torch.tensor(x, requires_grad=True) for x in ([3.0, 3.0], [2.0, 0.0], [1.0, 1.0]))
    (ql.td_loss(q, values.detach() + 0 * target).sum() + ql.expectile_loss(target, values, 0.9).sum()).backward()
    assert q.grad is not None and q.grad.tolist() == [4, 4]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-1.8, 0.2]))
    assert target.grad is None
    next_values = torch.ones(2, requires_grad=True)
    assert not ql.q_targets(torch.zeros(2), next_values, 0.9, torch.tensor([True, False])).requires_grad
    assert not ql.awac_weights(q, values, 1.0).requires_grad


def test_awac_weights_golden() -> None:
    # beta ln 2: differences 3, -1, 0 give 8, 1/2, 1; clipped at 4.
    q, values = torch.tensor([3.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])
    torch.testing.assert_close(ql.awac_weights(q, values, LN2), torch.tensor([8.0, 0.5, 1.0]))
    torch.testing.assert_close(ql.awac_weights(q, values, LN2, clip=4.0), torch.tensor([4.0, 0.5, 1.0]))
    assert ql.awac_weights(q, values, 0.0).tolist() == [1, 1, 1]
    torch.testing.assert_close(ql.awac_weights(q * 1000, values, 1.0)[0].item(), math.exp(20), rtol=1e-6, atol=0)


def test_guided_logits_golden() -> None:
    # pi = (1/2, 1/4, 1/4), V = 1, beta = 2 ln 2, Q - V = (0, 1, 1/2): weights 1/2, 1/4 * 4 = 1, 1/4 * 2 = 1/2.
    logits, q, values = torch.tensor([[0.5, 0.25, 0.25]]).log() + 7, torch.tensor([[1.0, 2.0, 1.5]]), torch.ones(1)
    got = ql.guided_logits(logits, q, values, 2 * LN2)
    torch.testing.assert_close(got.softmax(-1), torch.tensor([[0.25, 0.5, 0.25]]))
    torch.testing.assert_close(got.exp(), torch.tensor([[0.5, 1.0, 0.5]]))
    # A forbidden token stays forbidden, whatever its Q.
    forbidden = logits.masked_fill(torch.tensor([[False, True, False]]), -torch.inf)
    got = ql.guided_logits(forbidden, q * 100, values, 2.0).softmax(-1)
    assert got[0, 1] == 0 and torch.isfinite(got).all()


def test_polyak_golden() -> None:
    online, target = torch.tensor([1.0, 3.0]), torch.tensor([5.0, -1.0])
    assert ql.polyak(online, target, 0.25).tolist() == [4.0, 0.0]
    assert ql.polyak(online, target, 1.0).tolist() == [1.0, 3.0]
    assert ql.polyak(online, target, 0.0).tolist() == [5.0, -1.0]


def test_the_penalty_is_taken_at_a_temperature_of_one() -> None:
    # log(e^0 + e^2) - 2 and minus 0.
    q = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
    torch.testing.assert_close(ql.conservative_loss(q, torch.tensor([1, 0])), torch.tensor([0.1269280, 2.1269280]))


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature \(0.0\) must be above 0"):
        ql.conservative_loss(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0.0)


def test_batches_without_rows_or_tokens() -> None:
    for rows, width in [(0, 3), (2, 0)]:
        action = torch.ones(rows, width, dtype=torch.bool)
        next_values, continues = ql.next_action_values(torch.ones(rows, width + 1), action)
        assert next_values.shape == continues.shape == (rows, width)
        assert ql.monte_carlo_returns(torch.ones(rows, width), action, 0.9).shape == (rows, width)


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[Batch, torch.Tensor]:
    """Rewards and values over real tokens, and which of these are actions."""
    batch = draw(batches(2))
    count = batch.mask.numel()
    spoken = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    return batch, spoken.reshape(batch.mask.shape) & batch.mask


def with_last_state(values: torch.Tensor, last: float = 3.0) -> torch.Tensor:
    return torch.cat([values, torch.full_like(values[:, :1], last)], dim=1)


@QUICK
@given(dialogues(), FRACTIONS)
def test_next_values_and_returns_equal_numpy(given: tuple[Batch, torch.Tensor], gamma: float) -> None:
    batch, action = given
    rewards, values = batch.fields
    states = with_last_state(values)
    expected, expected_continues = reference.next_action_values(states.numpy(), action.numpy())
    got, continues = ql.next_action_values(states, action)
    np.testing.assert_array_equal(got.numpy(), expected)
    np.testing.assert_array_equal(continues.numpy(), expected_continues)
    targets = ql.q_targets(rewards, got, gamma, continues)
    np.testing.assert_allclose(targets.numpy(), rewards.numpy() + gamma * expected, atol=1e-12)
    returns = ql.monte_carlo_returns(rewards, action, gamma)
    expected = discounted_returns(rewards.numpy(), action.numpy(), gamma)
    np.testing.assert_allclose(returns.numpy(), expected, atol=1e-12)


@QUICK
@given(dialogues(), LAYOUTS, FRACTIONS)
def test_other_tokens_and_padding_do_not_matter(
    given: tuple[Batch, torch.Tensor], layout: Layout, gamma: float
) -> None:
    """Neither how rows are padded, nor what stands at places that are no actions."""
    batch, action = given
    other = layout(Batch([*batch.fields, action.double()], batch.mask))
    rewards, values, spoken = other.fields
    other_action = (spoken == 1) & other.mask
    hidden = [torch.where(other_action, field, layout.junk) for field in (rewards, values)]
    for formula in (ql.next_action_values, lambda v, a: (ql.monte_carlo_returns(v[:, :-1], a, gamma), a)):
        got, got_flags = formula(with_last_state(hidden[1], layout.junk), other_action)
        expected, flags = formula(with_last_state(batch.fields[1]), action)
        assert torch.equal(got[other_action], expected[action])
        assert torch.equal(got_flags[other_action], flags[action])
        assert (got[~other_action] == 0).all()


@QUICK
@given(dialogues())
def test_the_returns_solve_the_bellman_equation(given: tuple[Batch, torch.Tensor]) -> None:
    batch, action = given
    rewards = batch.fields[0]
    returns = ql.monte_carlo_returns(rewards, action, 0.5)
    next_values, continues = ql.next_action_values(with_last_state(returns), action)
    targets = ql.q_targets(rewards, next_values, 0.5, continues)
    torch.testing.assert_close(zero_padding(targets, action), returns)


@QUICK
@given(batches(2), TAUS)
def test_elementwise_terms_equal_numpy(batch: Batch, tau: float) -> None:
    x, y = batch.fields
    pairs: list[tuple[torch.Tensor, Callable[..., float]]] = [
        (ql.td_loss(x, y), lambda q, target: (q - target) ** 2),
        (ql.expectile_loss(x, y, tau), partial(reference.expectile, tau=tau)),
        (ql.awac_weights(x, y, 0.5, 3.0), lambda q, v: min(math.exp(0.5 * (q - v)), 3.0)),
    ]
    for got, formula in pairs:
        expected: Any = elementwise(formula, x.numpy(), y.numpy())
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@QUICK
@given(st.lists(NUMBERS, min_size=1, max_size=8), TAUS)
def test_the_expectile_loss_is_least_at_the_expectile(numbers: list[float], tau: float) -> None:
    """Where the weights of what lies above and below balance; at tau 1/2 that is the mean."""
    target = torch.tensor(numbers, dtype=torch.float64)
    low, high = target.min(), target.max()
    for _ in range(60):  # bisection on the gradient, which grows with V
        middle = ((low + high) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(ql.expectile_loss(target, middle, tau).sum(), middle)
        low, high = (middle.detach(), high) if slope < 0 else (low, middle.detach())
    above, below = (target - low).clamp(min=0).sum(), (low - target).clamp(min=0).sum()
    torch.testing.assert_close(tau * above, (1 - tau) * below, atol=1e-9, rtol=1e-9)
    if tau == 0.5:
        torch.testing.assert_close(low, target.mean(), atol=1e-9, rtol=1e-9)


ROW = st.lists(NUMBERS, min_size=4, max_size=4)


@QUICK
@given(ROW, ROW, NUMBERS, st.sampled_from([0.0, 1.0, 4.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_tables_equal_numpy(
    policy: list[float], values: list[float], v: float, beta: float, temperature: float
) -> None:
    logits, q = (torch.tensor([row], dtype=torch.float64) for row in (policy, values))
    got = ql.conservative_loss(q, torch.tensor([2]), temperature)
    expected = reference.conservative(q[0].numpy(), 2, temperature)
    np.testing.assert_allclose(got.numpy(), [expected], rtol=1e-9, atol=1e-12)
    guided = ql.guided_logits(logits, q, torch.tensor([v], dtype=torch.float64), beta)
    expected_row = reference.guided(logits[0].numpy(), q[0].numpy(), v, beta, 4, temperature)
    np.testing.assert_allclose((guided / temperature).softmax(-1)[0].numpy(), expected_row, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@QUICK
@given(st.data(), LAYOUTS)
def test_padding_changes_nothing(name: str, data: st.DataObject, layout: Layout) -> None:
    formula, fields = FORMULAS[name]
    check_padding_is_silent(formula, data.draw(batches(fields)), layout)


@pytest.mark.parametrize("name", FORMULAS)
@QUICK
@given(st.data())
def test_rows_add_up(name: str, data: st.DataObject) -> None:
    formula, fields = FORMULAS[name]
    check_rows_add_up(formula, *data.draw(splits(fields)))
