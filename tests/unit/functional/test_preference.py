"""Losses on pairs of completions, and the numbers of whole completions that they take."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional import preference_numpy as twin
from tests.unit.functional.properties import (
    LAYOUTS,
    QUICK,
    Formula,
    Layout,
    batches,
    check_padding_is_silent,
    check_rows_add_up,
    splits,
)
from tests.unit.functional.reference_numpy import elementwise
from trlx_like.functional import preference as pf

LN3 = math.log(3)  # sigmoid(ln 3) = 3/4, so -ls(ln 3) = ln(4/3) = 0.2876821 and -ls(-ln 3) = ln 4 = 1.3862944
NAN = float("nan")

FORMULAS: dict[str, Formula] = {
    "sigmoid": pf.sigmoid_loss,
    "smoothed": partial(pf.sigmoid_loss, label_smoothing=0.2),
    "robust": partial(pf.robust_loss, label_smoothing=0.2),
    "hinge": pf.hinge_loss,
    "ipo": partial(pf.ipo_loss, beta=0.3),
    "exo_pair": partial(pf.exo_pair_loss, label_smoothing=0.2),
    "discopop": partial(pf.discopop_loss, tau=0.5),
    "nca_pair": pf.nca_pair_loss,
    "bco_pair": pf.bco_pair_loss,
    "sppo_hard": partial(pf.sppo_hard_loss, beta=0.3),
    "apo_zero": pf.apo_zero_loss,
    "apo_down": pf.apo_down_loss,
}
every_formula = pytest.mark.parametrize("name", list(FORMULAS))


def assert_values(got: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


# Golden numbers. Margins are ln 3, and minus that.
MARGINS = torch.tensor([LN3, -LN3])


def test_sigmoid_golden() -> None:
    assert_values(pf.sigmoid_loss(MARGINS), [0.2876821, 1.3862944])
    # 0.9 * 0.2876821 + 0.1 * 1.3862944 = 0.2589139 + 0.1386294, and the other way round 1.2476649 + 0.0287682.
    assert_values(pf.sigmoid_loss(MARGINS, 0.1), [0.3975433, 1.2764331])


def test_robust_golden() -> None:
    # (0.2589139 - 0.1386294) / 0.8, (1.2476649 - 0.0287682) / 0.8.
    assert_values(pf.robust_loss(MARGINS, 0.1), [0.1503556, 1.5236209])


def test_hinge_golden() -> None:
    assert_values(pf.hinge_loss(torch.tensor([LN3, -1.0, 0.25])), [0, 2, 0.75])


def test_ipo_golden() -> None:
    # The target is 1 / (2 * 0.5) = 1.
    assert_values(pf.ipo_loss(torch.tensor([0.5, 3.0, 1.0]), beta=0.5), [0.25, 4, 0])


def test_exo_pair_golden() -> None:
    # 0.75 (ln 0.75 - ln 0.9) + 0.25 (ln 0.25 - ln 0.1) = -0.1367412 + 0.2290727; 0 where sigmoid(m) is 1 - e.
    assert_values(pf.exo_pair_loss(torch.tensor([LN3, math.log(9)]), 0.1), [0.0923315, 0])


def test_nca_pair_golden() -> None:
    # ln(4/3) + (ln 4 + ln(4/3)) / 2 = 0.2876821 + 0.8369883; ln(4/3) + (ln 4 + ln 4) / 2 = 0.2876821 + 1.3862944.
    assert_values(pf.nca_pair_loss(torch.tensor([LN3, LN3]), torch.tensor([-LN3, LN3])), [1.1246703, 1.6739764])


def test_bco_pair_golden() -> None:
    # 2 ln(4/3); ln(4/3) + ln 4.
    assert_values(pf.bco_pair_loss(torch.tensor([LN3, LN3]), torch.tensor([-LN3, LN3])), [0.5753641, 1.6739764])


def test_sppo_hard_golden() -> None:
    # Targets 1 and -1: (0.5 - 1)^2 + (-0.5 + 1)^2; (2 - 1)^2 + (2 + 1)^2.
    assert_values(pf.sppo_hard_loss(torch.tensor([0.5, 2.0]), torch.tensor([-0.5, 2.0]), beta=0.5), [0.5, 10])


def test_apo_golden() -> None:
    chosen, rejected = torch.tensor([LN3, 0.0]), torch.tensor([-LN3, -LN3])
    assert_values(pf.apo_zero_loss(chosen, rejected), [0.25 + 0.25, 0.5 + 0.25])
    # sigmoid(2 ln 3) = 9/10: 0.75 + 0.1; 0.5 + 1 - 0.75.
    assert_values(pf.apo_down_loss(chosen, rejected), [0.85, 0.75])


def test_unpaired_golden() -> None:
    """sigmoid(log 3) = 3/4: the reward is log 3 above the reference point, at it, and log 3 below."""
    rewards, desirable = torch.tensor([math.log(3), 0.0, -math.log(3)] * 2), torch.tensor([True] * 3 + [False] * 3)
    assert_values(pf.unpaired_loss(rewards, desirable, 0.0), [0.25, 0.5, 0.75, 0.75, 0.5, 0.25])
    assert_values(pf.unpaired_loss(rewards + 2.0, desirable, 2.0), [0.25, 0.5, 0.75, 0.75, 0.5, 0.25])


@given(st.floats(-15, 15), st.floats(0, 5), st.booleans())
def test_the_twin_of_the_unpaired_loss_agrees(reward: float, point: float, desirable: bool) -> None:
    value = 1 / (1 + math.exp(point - reward))  # as the paper writes it: v(x, y), with a weight of 1
    expected = 1 - value if desirable else 1 - 1 / (1 + math.exp(reward - point))
    rewards = torch.tensor([reward], dtype=torch.float64, requires_grad=True)
    loss = pf.unpaired_loss(rewards, torch.tensor([desirable]), point)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    loss.sum().backward()
    assert rewards.grad is not None
    slope = value * (1 - value) * (-1 if desirable else 1)
    assert rewards.grad.item() == pytest.approx(slope, rel=1e-6, abs=1e-12)


def test_discopop_golden() -> None:
    # tau 1, m = ln 3: w = 3/4, 0.25 * 0.2876821 + 0.75 / 3. m = -ln 3: w = 1/4, 0.75 * 1.3862944 + 0.25 * 3.
    assert_values(pf.discopop_loss(MARGINS, tau=1.0), [0.3219205, 1.7897208])
    # tau 0.05, m = 0.05: w = sigmoid(1) = 0.7310586, 0.2689414 * 0.6684594 + 0.7310586 * 0.9512294.
    assert_values(pf.discopop_loss(torch.tensor([0.05])), [0.8751809])


def test_sorted_margin_golden() -> None:
    # 1 2 3 minus 0 1 5.
    assert_values(pf.sorted_margin(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.0, 5.0, 1.0])), [1, 1, -2])


@pytest.mark.parametrize(
    ("kind", "coef", "expected"),
    [  # at u = 2 and u = 1/2
        ("reverse_kl", 0.5, [0.6931472, -0.6931472]),
        ("forward_kl", 0.5, [0.5, -1.0]),
        ("js_divergence", 0.5, [0.2876821, -0.4054651]),  # ln(4/3), ln(2/3)
        ("alpha_divergence", 0.5, [0.5857864, -0.8284271]),  # 2 (1 - u^-1/2): 2 - sqrt 2, 2 - 2 sqrt 2
        ("alpha_divergence", 2.0, [1.0, -0.5]),
        ("alpha_divergence", 1.0, [0.6931472, -0.6931472]),
        ("alpha_divergence", 0.0, [0.5, -1.0]),
    ],
)
def test_divergence_score_golden(kind: pf.Divergence, coef: float, expected: list[float]) -> None:
    assert_values(pf.divergence_score(torch.tensor([2.0, 0.5]).log(), kind, coef), expected)


def test_an_unknown_divergence() -> None:
    with pytest.raises(ValueError, match=r"kind \('hellinger'\) must be reverse_kl"):
        pf.divergence_score(torch.zeros(1), "hellinger")  # type: ignore[arg-type]


# Against the twin, and what must hold whatever the numbers.


@every_formula
@given(data=st.data())
@QUICK
def test_the_twin_agrees(name: str, data: st.DataObject) -> None:
    formula, fields = twin.LOSSES[name]
    batch = data.draw(batches(fields))
    *columns, _ = batch.numpy()
    expected = torch.from_numpy(elementwise(formula, *columns))
    torch.testing.assert_close(FORMULAS[name](*batch.fields), expected, rtol=1e-9, atol=1e-9)


@given(
    st.floats(-4, 4),
    st.sampled_from(["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]),
    st.floats(-1, 3).filter(lambda coef: abs(coef - 1) > 1e-3),
)
@QUICK
def test_the_twin_agrees_on_divergences(d: float, kind: pf.Divergence, coef: float) -> None:
    got = pf.divergence_score(torch.tensor(d, dtype=torch.float64), kind, coef)
    assert got.item() == pytest.approx(twin.score(d, kind, coef), rel=1e-7, abs=1e-9)


@every_formula
@given(data=st.data(), layout=LAYOUTS)
@QUICK
def test_padding_is_silent(name: str, data: st.DataObject, layout: Layout) -> None:
    check_padding_is_silent(FORMULAS[name], data.draw(batches(twin.LOSSES[name][1])), layout)


@every_formula
@given(data=st.data())
@QUICK
def test_rows_add_up(name: str, data: st.DataObject) -> None:
    check_rows_add_up(FORMULAS[name], *data.draw(splits(twin.LOSSES[name][1])))


@every_formula
@pytest.mark.parametrize("margin", [-1e4, -100.0, 100.0, 1e4])
def test_far_out_numbers_stay_finite(name: str, margin: float) -> None:
    fields = [torch.tensor([margin * (1 - 2 * k)], requires_grad=True) for k in range(twin.LOSSES[name][1])]
    loss = FORMULAS[name](*fields)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(field.grad is not None and field.grad.isfinite().all() for field in fields)


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_a_score_that_is_far_out_keeps_its_gradient(kind: pf.Divergence) -> None:
    """Chosen text that the policy has all but abandoned must still be pulled back."""
    ratio = torch.tensor([-100.0], requires_grad=True)
    score = pf.divergence_score(ratio, kind)
    score.backward()
    assert score.isfinite().all()
    assert ratio.grad is not None and 0.5 < ratio.grad.item() < 1e9


@given(st.floats(-4, 4), st.floats(0.01, 0.45))
@QUICK
def test_robust_loss_is_unbiased(margin: float, e: float) -> None:
    """Over labels that are flipped with probability e its mean is the loss without noise."""
    m = torch.tensor(margin, dtype=torch.float64)
    mean = (1 - e) * pf.robust_loss(m, e) + e * pf.robust_loss(-m, e)
    torch.testing.assert_close(mean, pf.sigmoid_loss(m))


@given(st.permutations(range(5)), st.permutations(range(5)))
@QUICK
def test_sorted_margin_does_not_see_the_order(first: list[int], second: list[int]) -> None:
    better, worse = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.0]), torch.tensor([4.0, -2.0, 0.0, 1.0, 7.0])
    assert torch.equal(pf.sorted_margin(better[first], worse[second]), pf.sorted_margin(better, worse))
