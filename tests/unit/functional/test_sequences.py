"""Numbers of whole sequences: sums, length desensitized, and the weights of WPO."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given, strategies as st

from tests.unit.functional.properties import (
    LAYOUTS,
    QUICK,
    Batch,
    Layout,
    batches,
)
from tests.unit.functional.test_preference import NAN, assert_values
from trlx_like.functional.sequences import length_desensitized, policy_weights, sequence_means, sequence_sums


def test_length_desensitized_golden() -> None:
    # -1 - 2 + 0.5 * (-4 - 8); a shorter one, whose every token counts.
    logprobs = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-3.0, -5.0, NAN, NAN]])
    mask = logprobs.isfinite()
    assert_values(length_desensitized(logprobs, mask, torch.tensor([2, 2]), 0.5), [-9, -8])
    assert_values(length_desensitized(logprobs, mask, torch.tensor([2, 2]), 1.0), [-15, -8])
    assert_values(sequence_sums(logprobs, mask), [-15, -8])


def test_a_row_without_tokens_is_zero() -> None:
    """And not NaN, whatever its padding holds; without rows there is nothing."""
    values, mask = torch.tensor([[NAN, torch.inf], [3.0, 5.0]]), torch.tensor([[False, False], [True, True]])
    assert sequence_sums(values, mask).tolist() == [0, 8]
    assert sequence_means(values, mask).tolist() == [0, 4]
    assert length_desensitized(values, mask, torch.tensor([0, 1]), 0.5).tolist() == [0, 5.5]
    assert sequence_means(values[:0], mask[:0]).shape == sequence_sums(values[:0], mask[:0]).shape == (0,)
    assert sequence_means(values[:, :0], mask[:, :0]).tolist() == [0, 0]


def test_each_row_is_averaged_over_its_own_tokens() -> None:
    values = torch.tensor([[3.0, NAN, NAN], [1.0, 2.0, 6.0]])
    assert sequence_means(values, values.isfinite()).tolist() == [3, 3]


def test_policy_weights_golden() -> None:
    # exp((ln(0.5 / 0.5) + ln(0.25 / 0.5)) / 2) = sqrt(1/2); a row without tokens; one with one: 0.25 / 0.5.
    logprobs = torch.tensor([[0.5, 0.25, NAN], [NAN, NAN, NAN], [0.25, NAN, NAN]]).log()
    collision = torch.full((3, 3), 0.5).log()
    assert_values(policy_weights(logprobs, collision, logprobs.isfinite()), [0.7071068, 1, 0.5])


@given(batches(1), LAYOUTS, st.integers(0, 5), st.floats(0, 1))
@QUICK
def test_sequences_do_not_see_padding(batch: Batch, layout: Layout, shared: int, alpha: float) -> None:
    other = layout(batch)
    rows = torch.full((len(batch.mask),), shared)
    for formula in (
        sequence_sums,
        partial(length_desensitized, shared=rows, alpha=alpha),
        lambda x, mask: policy_weights(x, 0.5 * x, mask),
    ):
        torch.testing.assert_close(formula(other.fields[0], other.mask), formula(batch.fields[0], batch.mask))


@given(batches(1), st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0]))
@QUICK
def test_length_desensitized_gradients(batch: Batch, shared: int, alpha: float) -> None:
    """1 for each shared token, alpha for the others, 0 at padding."""
    logprobs = batch.fields[0].clone().requires_grad_()
    length_desensitized(logprobs, batch.mask, torch.full((len(batch.mask),), shared), alpha).sum().backward()
    assert logprobs.grad is not None
    for row, mask in zip(logprobs.grad.tolist(), batch.mask.tolist(), strict=True):
        length = sum(mask)
        assert row[:length] == [1.0] * min(shared, length) + [alpha] * max(0, length - shared)
        assert not any(row[length:])


def test_policy_weights_have_no_gradient() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    assert not policy_weights(logprobs, logprobs, torch.ones(1, 2, dtype=torch.bool)).requires_grad
