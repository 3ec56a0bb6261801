"""PPO's losses and their diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import (
    LAYOUTS,
    QUICK,
    Batch,
    Formula,
    Layout,
    batches,
    check_padding_is_silent,
    check_rows_add_up,
    splits,
)
from trlx_like.functional import policy_gradient as pg
from trlx_like.functional.masked import masked_sum

CLIP = 0.2
NAN = float("nan")

# Ratios and advantages with c = 0.2, so the range is [0.8, 1.2]; -A r and -A clip(r):
#   r 1.5, A  2: -3.0, -2.4 -> -2.4 clipped     r 0.5, A  2: -1.0, -1.6 -> -1.0
#   r 1.5, A -2:  3.0,  2.4 ->  3.0             r 0.5, A -2:  1.0,  1.6 ->  1.6 clipped
#   r 1.1, A  1: -1.1 inside                    the last place is padding
RATIOS = [1.5, 1.5, 0.5, 0.5, 1.1]
OLD = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, NAN])
ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0, NAN])
MASK = torch.tensor([True] * 5 + [False])

FORMULAS: dict[str, tuple[Formula, int]] = {
    "clipped_surrogate": (partial(pg.clipped_surrogate, cliprange=CLIP), 3),
    "clip_fraction": (partial(pg.clip_fraction, cliprange=CLIP), 2),
    "clipped_value_loss": (partial(pg.clipped_value_loss, cliprange_value=0.5), 3),
    "value_loss": (partial(pg.clipped_value_loss, cliprange_value=None), 3),
    "approx_kl": (pg.approx_kl, 2),
}


def new_logprobs() -> torch.Tensor:
    return torch.cat([OLD[:5] + torch.tensor(RATIOS).log(), torch.zeros(1)]).requires_grad_()


def test_clipped_surrogate_golden() -> None:
    logprobs = new_logprobs()
    loss = pg.clipped_surrogate(logprobs, OLD, ADVANTAGES, CLIP)
    torch.testing.assert_close(loss[:5].detach(), torch.tensor([-2.4, 3.0, -1.0, 1.6, -1.1]))
    total = masked_sum(loss, MASK)  # -2.4 + 3 - 1 + 1.6 - 1.1 = 0.1
    torch.testing.assert_close(total.item(), 0.1, rtol=1e-5, atol=1e-6)
    total.backward()
    # The gradient to log pi is -A r where the first branch is the larger one, 0 where the ratio is clipped.
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[:5], torch.tensor([0.0, 3.0, -1.0, 0.0, -1.1]))


def test_clip_higher_golden() -> None:
    """With c_high 0.6 the ratio 1.5 is inside: of the above only r 1.5, A 2 changes, to -3."""
    loss = pg.clipped_surrogate(new_logprobs(), OLD, ADVANTAGES, CLIP, 0.6)
    torch.testing.assert_close(loss[:5].detach(), torch.tensor([-3.0, 3.0, -1.0, 1.6, -1.1]))


def test_clip_sides_golden() -> None:
    """Only where the clip acts: above with A > 0 (the first place), below with A < 0 (the fourth)."""
    low, high = pg.clip_sides(new_logprobs(), OLD, ADVANTAGES, CLIP, CLIP)
    assert low[:5].tolist() == [0, 0, 0, 1, 0]
    assert high[:5].tolist() == [1, 0, 0, 0, 0]
    assert pg.clip_sides(new_logprobs(), OLD, ADVANTAGES, CLIP, 0.6)[1][:5].tolist() == [0] * 5


def test_clip_fraction_golden() -> None:
    outside = pg.clip_fraction(new_logprobs(), OLD, CLIP)
    assert outside[:5].tolist() == [1, 1, 1, 1, 0]
    assert masked_sum(outside, MASK).item() == 4


def test_clipped_value_loss_golden() -> None:
    # V 2, V_old 1, c 0.5, so clip(V) = 1.5. R 3: errors 1, 2.25. R 0: errors 4, 2.25. Half the larger one.
    values, old, returns = torch.tensor([2.0, 2.0, 2.0]), torch.ones(3), torch.tensor([3.0, 0.0, NAN])
    mask = torch.tensor([True, True, False])
    loss = pg.clipped_value_loss(values, old, returns, 0.5)
    assert loss[:2].tolist() == [1.125, 2.0]
    assert masked_sum(loss, mask).item() == 3.125
    assert masked_sum(pg.clipped_value_loss(values, old, returns, None), mask).item() == 0.5 + 2.0


def test_approx_kl_golden() -> None:
    # r - 1 - ln r: at 2, 1 - ln 2 = 0.3068528; at 1/2, ln 2 - 1/2 = 0.1931472; at 1, 0.
    logprobs = torch.tensor([2.0, 0.5, 1.0, NAN]).log()
    got = pg.approx_kl(logprobs, torch.zeros(4))
    torch.testing.assert_close(got[:3], torch.tensor([0.3068528, 0.1931472, 0.0]))
    torch.testing.assert_close(masked_sum(got, logprobs.isfinite()).item(), 0.5, rtol=1e-5, atol=1e-6)


def test_explained_variance_golden() -> None:
    # Returns 1, 2, 3: m2 2. Residuals 0, 0, 1: mean 1/3, m2 = 1/9 + 1/9 + 4/9 = 2/3. 1 - (2/3) / 2 = 2/3.
    returns, mask = torch.tensor([1.0, 2.0, 3.0, NAN]), torch.tensor([True, True, True, False])
    got = pg.explained_variance(torch.tensor([1.0, 2.0, 2.0, NAN]), returns, mask)
    torch.testing.assert_close(got, torch.tensor(2 / 3))
    assert pg.explained_variance(returns, returns, mask).item() == 1
    for constant in (1.0, 0.7):
        equal = torch.full((999,), constant)
        assert pg.explained_variance(torch.randn(999), equal, torch.ones(999, dtype=torch.bool)).item() == 0


def test_a_ratio_at_the_bound_is_not_clipped() -> None:
    """With a range of 0 and a ratio of 1; nor is one outside that has no advantage. Metrics have no gradient."""
    same, either = torch.zeros(2), torch.tensor([1.0, -1.0])
    assert [side.tolist() for side in pg.clip_sides(same, same, either, 0.0, 0.0)] == [[0, 0], [0, 0]]
    assert [side.tolist() for side in pg.clip_sides(either, same, same, 0.1, 0.1)] == [[0, 0], [0, 0]]
    assert pg.clip_fraction(same, same, 0.0).tolist() == [0, 0]
    one, other = (torch.zeros(2, requires_grad=True) for _ in range(2))
    assert not any(metric.requires_grad for metric in pg.ratio_metrics(one, other, 0.1).values())


def test_explained_variance_has_a_threshold() -> None:
    """Returns that vary by more than 1e-6 of their mean count, by less they do not. Around 0 any variation counts."""
    mask = torch.ones(2, dtype=torch.bool)
    for mean in (1.0, -1000.0):
        for spread, counts in ((1.5e-6, True), (0.7e-6, False)):
            returns = torch.tensor([mean - spread * mean, mean + spread * mean], dtype=torch.float64)
            assert pg.explained_variance(returns, returns, mask).item() == float(counts)
    tiny = torch.tensor([-1e-12, 1e-12], dtype=torch.float64)
    assert pg.explained_variance(torch.zeros_like(tiny), tiny, mask).item() == 0
    assert pg.explained_variance(tiny, tiny, mask).item() == 1


def test_a_ratio_beyond_float32_spoils_nothing() -> None:
    logprobs = torch.tensor([200.0, 200.0, -200.0, 0.0], requires_grad=True)
    loss = pg.clipped_surrogate(logprobs, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0]), CLIP)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, math.exp(20), -math.exp(-20), -1.0]))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0, 0, 0, -1]
    assert torch.isfinite(pg.approx_kl(logprobs, torch.zeros(4))).all()


@QUICK
@given(batches(3), st.sampled_from([0.1, 0.2, 0.5]))
def test_equals_numpy(batch: Batch, c: float) -> None:
    x, y, z, _ = batch.numpy()
    a, b, d = batch.fields
    pairs: list[tuple[torch.Tensor, Callable[..., float], tuple[Any, ...]]] = [
        (pg.clipped_surrogate(a, b, d, c), partial(reference.clipped_surrogate, cliprange=c), (x, y, z)),
        (pg.clip_fraction(a, b, c), partial(reference.clip_indicator, cliprange=c), (x, y)),
        (pg.clipped_value_loss(a, b, d, c), partial(reference.clipped_value_loss, cliprange=c), (x, y, z)),
        (
            pg.clipped_value_loss(a, b, d, None),
            partial(reference.clipped_value_loss, cliprange=None),
            (x, y, z),
        ),
        (pg.approx_kl(a, b), lambda new, old: math.exp(new - old) - 1 - (new - old), (x, y)),
    ]
    for got, formula, arrays in pairs:
        expected: Any = reference.elementwise(formula, *arrays)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


@QUICK
@given(batches(2), LAYOUTS)
def test_explained_variance_equals_numpy_whatever_the_padding(batch: Batch, layout: Layout) -> None:
    expected = reference.explained_variance(*batch.numpy())
    for version in (batch, layout(batch)):
        values, returns = version.fields
        got = pg.explained_variance(values, returns, version.mask)
        torch.testing.assert_close(got.item(), expected, rtol=1e-6, atol=1e-9)


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


@QUICK
@given(batches(2))
def test_gradient_at_ratio_one_is_the_policy_gradient(batch: Batch) -> None:
    advantages = batch.fields[1]
    weight = batch.fields[0].clone().requires_grad_()
    logprobs = torch.log_softmax(weight, dim=-1)
    (surrogate,) = torch.autograd.grad(
        pg.clipped_surrogate(logprobs, logprobs.detach(), advantages, CLIP).sum(), weight, retain_graph=True
    )
    (reinforce,) = torch.autograd.grad((-advantages * logprobs).sum(), weight)
    torch.testing.assert_close(surrogate, reinforce)


def test_rollout_ratio_by_hand() -> None:
    """Tokens: 0.5/0.25, 0.2/0.4, 0.9/0.9; 0.1/0.2, and padding that would overflow. Sequences: 2 * .5 * 1 and .5."""
    learner = torch.tensor([[0.5, 0.2, 0.9], [0.1, 1.0, 1.0]], dtype=torch.float64).log()
    engine = torch.tensor([[0.25, 0.4, 0.9], [0.2, 1e-300, 0.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tokens = pg.rollout_ratio(learner, engine, mask, "token")
    sequences = pg.rollout_ratio(learner, engine, mask, "sequence")
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(tokens, torch.tensor([[2, 0.5, 1], [0.5, 1, 1]]).double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(sequences, torch.tensor([[1, 1, 1], [0.5, 1, 1]]).double(), rtol=1e-15, atol=0)
    assert tokens.dtype == one.dtype and (tokens[~mask] == 1).all() and (sequences[~mask] == 1).all()


def assert_numbers(found: torch.Tensor, *expected: float) -> None:
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_rollout_ratio_is_bounded_by_hand() -> None:
    """e^20 and e^-20 at most, of a token and of a whole response."""
    mask, drawn = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    learned = torch.tensor([[30.0, 1.0, 0.0], [-15.0, -15.0, 0.0]])
    assert_numbers(pg.rollout_ratio(learned, drawn, mask, "token").log(), 20, 1, 0, -15, -15, 0)
    assert_numbers(pg.rollout_ratio(learned, drawn, mask, "sequence").log(), 20, 20, 20, -20, -20, -20)


def test_clip_sides_between_and_beyond_the_bounds() -> None:
    """c .2 and .3: ratios of .7, .9, 1.25 and 1.35, with an advantage of each sign."""
    ratio = torch.tensor([0.7, 0.9, 1.25, 1.35]).repeat(2).log()
    advantages = torch.tensor([-0.5] * 4 + [0.5] * 4)
    low, high = pg.clip_sides(ratio, torch.zeros(8), advantages, 0.2, 0.3)
    assert low.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert high.tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_ratio_metrics_by_hand() -> None:
    ratio = torch.tensor([0.5, 1.0, 1.1])
    found = pg.ratio_metrics(ratio.log().requires_grad_(), torch.zeros(3))
    assert list(found) == ["policy/approx_kl", "policy/ratio", "policy/ratio_deviation"]
    assert_numbers(found["policy/ratio"], 0.5, 1.0, 1.1)
    assert_numbers(found["policy/ratio_deviation"], 0.5, 0.0, 0.1)
    assert_numbers(found["policy/approx_kl"], 0.1931472, 0.0, 0.0046898)  # r - 1 - ln r
    assert not any(value.requires_grad for value in found.values())
    ranged = pg.ratio_metrics(ratio.log(), torch.zeros(3), 0.2)
    assert ranged["policy/clip_fraction"].tolist() == [1, 0, 0] and len(ranged) == 4
