"""KL estimators, the exact KL and the adaptive coefficient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import (
    LAYOUTS,
    NUMBERS,
    QUICK,
    Batch,
    Layout,
    batches,
    check_padding_is_silent,
    check_rows_add_up,
    splits,
)
from trlx_like.functional import kl
from trlx_like.functional.masked import masked_sum, zero_padding

LN2 = math.log(2)
KINDS: list[kl.KLKind] = ["kl", "abs", "mse", "k3"]
ROWS = st.integers(2, 5).flatmap(lambda v: st.lists(st.lists(NUMBERS, min_size=v, max_size=v), min_size=2, max_size=2))


@pytest.mark.parametrize(
    ("kind", "expected", "total"),
    [
        # d = ln 2 (policy twice as likely), then -ln 2. ln 2 = 0.6931472, (ln 2)^2 / 2 = 0.2402265.
        ("kl", [0.6931472, -0.6931472], 0.0),
        ("abs", [0.6931472, 0.6931472], 1.3862944),
        ("mse", [0.2402265, 0.2402265], 0.480453),
        # 1/2 - 1 + ln 2 and 2 - 1 - ln 2
        ("k3", [0.1931472, 0.3068528], 0.5),
    ],
)
def test_estimators_golden(kind: kl.KLKind, expected: list[float], total: float) -> None:
    logprobs = torch.tensor([-1.0, -1.0 - LN2, float("nan")])
    ref_logprobs = torch.tensor([-1.0 - LN2, -1.0, -2.0])
    got = kl.kl_penalty(logprobs, ref_logprobs, kind)
    torch.testing.assert_close(got[:2], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    mask = torch.tensor([True, True, False])
    torch.testing.assert_close(masked_sum(got, mask), torch.tensor(total), rtol=1e-5, atol=1e-6)


def test_k3_is_never_negative() -> None:
    """Where e^-d - 1 by exp would be, for d around 1e-4; a policy equal to its reference has 0."""
    d = torch.cat([torch.linspace(-1, 1, 20_001), torch.logspace(-9, 0, 10_001), -torch.logspace(-9, 0, 10_001)])
    assert ((-d).exp() - 1 + d).min() < -1e-8
    assert kl.kl_k3(d, torch.zeros_like(d)).min() == 0
    assert kl.kl_k3(torch.zeros(3), torch.zeros(3)).tolist() == [0, 0, 0]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind \('full'\) must be one of kl, abs, mse, k3"):
        kl.kl_penalty(torch.zeros(1), torch.zeros(1), cast(kl.KLKind, "full"))


def test_full_kl_golden() -> None:
    # (1/2, 1/2) against (1/4, 3/4): ln 2 / 2 + ln(2/3) / 2 = 0.3465736 - 0.2027326.
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    torch.testing.assert_close(kl.full_kl(p, q), torch.tensor(0.1438410))
    # A third token that both rule out; then one that only the policy does: (1/2, 1/2, 0), (1/4, 1/4, 1/2).
    p3, q3 = torch.tensor([0.5, 0.5, 0]).log(), torch.tensor([0.25, 0.75, 0]).log()
    torch.testing.assert_close(kl.full_kl(p3, q3), torch.tensor(0.1438410))
    torch.testing.assert_close(kl.full_kl(p3, torch.tensor([0.25, 0.25, 0.5]).log()), torch.tensor(LN2))
    # A token that only the reference rules out makes the policy infinitely far away.
    assert kl.full_kl(q3, torch.tensor([0, 1.0, 0]).log()).item() == math.inf
    # Two places, one padding.
    both = kl.full_kl(torch.stack([p, p * float("nan")]), torch.stack([q, q]))
    torch.testing.assert_close(masked_sum(both, torch.tensor([True, False])), torch.tensor(0.1438410))


def test_full_kl_gradient_is_finite_where_a_token_is_ruled_out() -> None:
    logits = torch.tensor([0.3, -0.2, -torch.inf], requires_grad=True)
    kl.full_kl(logits, torch.tensor([0.0, 0.5, -torch.inf])).backward()
    two = torch.tensor([0.3, -0.2], requires_grad=True)
    kl.full_kl(two, torch.tensor([0.0, 0.5])).backward()
    assert logits.grad is not None and two.grad is not None
    torch.testing.assert_close(logits.grad, torch.cat([two.grad, torch.zeros(1)]))


def test_full_kl_of_half_precision_logits_is_float32() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    ref = torch.tensor([1.0, 2.0, 3.5], dtype=torch.bfloat16)
    assert torch.equal(kl.full_kl(logits, ref), kl.full_kl(logits.float(), ref.float()))


P, Q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()


def test_forward_kl_and_jsd_golden() -> None:
    # The reference (1/4, 3/4) against the policy (1/2, 1/2): ln(1/2) / 4 + 3 ln(3/2) / 4 = -0.1732868 + 0.3040988.
    torch.testing.assert_close(kl.forward_kl(P, Q), torch.tensor(0.1308120))
    # beta = 1/2: m = (3/8, 5/8). KL(ref || m) = ln(2/3) / 4 + 3 ln(6/5) / 4 = 0.0353749,
    # KL(pi || m) = ln(4/3) / 2 + ln(4/5) / 2 = 0.0322693; the mean is 0.0338221.
    torch.testing.assert_close(kl.generalized_jsd(P, Q, 0.5), torch.tensor(0.0338221), rtol=0, atol=1e-6)
    # beta = 1/4: m = (7/16, 9/16). 0.25 (ln(4/7) / 4 + 3 ln(4/3) / 4) + 0.75 (ln(8/7) / 2 + ln(8/9) / 2).
    torch.testing.assert_close(kl.generalized_jsd(P, Q, 0.25), torch.tensor(0.0248700), rtol=0, atol=1e-6)
    # Two that rule each other out, (1, 0) and (0, 1): the entropy of a coin, here ln 4 / 4 + 3 ln(4/3) / 4.
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    torch.testing.assert_close(kl.generalized_jsd(sure[0], sure[1], 0.25), torch.tensor(0.5623351))


@pytest.mark.parametrize("divergence", [kl.forward_kl, partial(kl.generalized_jsd, beta=0.3)])
def test_divergence_gradient_is_finite_where_a_token_is_ruled_out(divergence: Any) -> None:
    logits = torch.tensor([0.3, -0.2, -torch.inf], requires_grad=True)
    divergence(logits, torch.tensor([0.0, 0.5, -torch.inf])).backward()
    two = torch.tensor([0.3, -0.2], requires_grad=True)
    divergence(two, torch.tensor([0.0, 0.5])).backward()
    assert logits.grad is not None and two.grad is not None
    torch.testing.assert_close(logits.grad, torch.cat([two.grad, torch.zeros(1)]))


@QUICK
@given(ROWS, st.floats(0.01, 0.99))
def test_forward_kl_and_jsd_equal_numpy(rows: list[list[float]], beta: float) -> None:
    logits, ref_logits = torch.tensor(rows, dtype=torch.float64)
    probs, ref_probs = (reference.distribution(np.array(row), 1.0, None) for row in rows)
    torch.testing.assert_close(kl.forward_kl(logits, ref_logits).item(), reference.kl(ref_probs, probs))
    mixed = [beta * ref + (1 - beta) * own for ref, own in zip(ref_probs, probs, strict=True)]
    expected = beta * reference.kl(ref_probs, mixed) + (1 - beta) * reference.kl(probs, mixed)
    got = kl.generalized_jsd(logits, ref_logits, beta).item()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert -1e-12 <= got <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-12
    swapped = kl.generalized_jsd(ref_logits, logits, 1 - beta).item()
    torch.testing.assert_close(got, swapped, rtol=1e-9, atol=1e-12)


@QUICK
@given(ROWS)
def test_jsd_has_the_gradients_of_both_kl_at_its_ends(rows: list[list[float]]) -> None:
    """Agarwal et al. 2024, after eq. 1."""
    logits, ref_logits = torch.tensor(rows, dtype=torch.float64)
    for beta, weight, end in ((1e-6, 1e-6, kl.forward_kl), (1 - 1e-6, 1e-6, kl.full_kl)):
        found = []
        for value in (kl.generalized_jsd(at := logits.clone().requires_grad_(), ref_logits, beta) / weight, None):
            total = end(at, ref_logits) if value is None else value
            found.append(torch.autograd.grad(total, at)[0])
        torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-3)


def test_adaptive_coef_golden() -> None:
    # Error 9/6 - 1 = 0.5 is clipped to 0.2: 0.2 * (1 + 0.2 * 64 / 10000) = 0.2 * 1.00128.
    assert kl.adaptive_kl_coef(0.2, kl=9, target=6, n_steps=64, horizon=10_000) == pytest.approx(0.200256)
    # 5.7/6 - 1 = -0.05 is not clipped: 0.2 * (1 - 0.05 * 0.0064).
    assert kl.adaptive_kl_coef(0.2, kl=5.7, target=6, n_steps=64, horizon=10_000) == pytest.approx(0.199936)
    assert kl.adaptive_kl_coef(0.2, kl=0, target=6, n_steps=64, horizon=10_000) == pytest.approx(0.199744)


def test_k3_is_finite_and_never_negative() -> None:
    d = torch.cat([torch.linspace(-1, 1, 2001) * 10.0**-k for k in range(-2, 10)])
    got = kl.kl_k3(d, torch.zeros_like(d))
    assert (got >= 0).all() and torch.isfinite(got).all()
    # d = 1e-4: e^-d - 1 + d = d^2 / 2 - ... = 5e-9, where float32 steps below 1 are 6e-8 wide.
    small = kl.kl_k3(torch.tensor(1e-4), torch.tensor(0.0))
    torch.testing.assert_close(small.item(), 5e-9, rtol=1e-2, atol=0)


def test_k3_of_an_abandoned_token_is_finite_without_gradient() -> None:
    logprobs = torch.tensor([-300.0, -1.0], requires_grad=True)
    loss = kl.kl_k3(logprobs, torch.tensor([-1.0, -1.0]))
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0, 0]


@QUICK
@given(batches(2), st.sampled_from(KINDS))
def test_equals_numpy(batch: Batch, kind: kl.KLKind) -> None:
    logprobs, ref_logprobs, _ = batch.numpy()
    expected: Any = reference.elementwise(partial(reference.kl_token, kind=kind), logprobs, ref_logprobs)
    got = kl.kl_penalty(batch.fields[0], batch.fields[1], kind)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


@QUICK
@given(ROWS)
def test_full_kl_equals_numpy_and_the_mean_of_its_estimators(rows: list[list[float]]) -> None:
    logits, ref_logits = torch.tensor(rows, dtype=torch.float64)
    probs, ref_probs = (reference.distribution(np.array(row), 1.0, None) for row in rows)
    exact = kl.full_kl(logits, ref_logits)
    torch.testing.assert_close(exact.item(), reference.kl(probs, ref_probs), rtol=1e-9, atol=1e-12)
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    for unbiased in (kl.kl_k1, kl.kl_k3):
        expectation = (logprobs.exp() * unbiased(logprobs, ref_logprobs)).sum()
        torch.testing.assert_close(expectation, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(batches(2), LAYOUTS)
def test_padding_changes_nothing(kind: kl.KLKind, batch: Batch, layout: Layout) -> None:
    check_padding_is_silent(partial(kl.kl_penalty, kind=kind), batch, layout)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(splits(2))
def test_rows_add_up(kind: kl.KLKind, split: tuple[Batch, list[int], int]) -> None:
    check_rows_add_up(partial(kl.kl_penalty, kind=kind), *split)


def test_full_kl_padding_changes_nothing() -> None:
    logits = torch.tensor([[0.1, 0.9], [float("nan"), 1e30]], requires_grad=True)
    mask = torch.tensor([True, False])
    loss = masked_sum(kl.full_kl(zero_padding(logits, mask[:, None]), torch.zeros(2, 2)), mask)
    loss.backward()
    alone = torch.tensor([[0.1, 0.9]], requires_grad=True)
    expected = kl.full_kl(alone, torch.zeros(1, 2)).sum()
    expected.backward()
    assert logits.grad is not None and alone.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, torch.cat([alone.grad, torch.zeros(1, 2)]))
