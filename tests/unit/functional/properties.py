"""What must hold for every masked formula: the batches it is tried on, and the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings, strategies as st
from torch import Tensor

from trlx_like.functional.masked import masked_sum, zero_padding

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
NUMBERS = st.floats(-4, 4, width=32)
JUNK = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30])

Formula = Callable[..., Tensor]


@dataclass
class Batch:
    """Some float64 tensors over the same places."""

    fields: list[Tensor]  # each [B, R]
    mask: Tensor  # [B, R] bool, real places contiguous

    def numpy(self) -> tuple[np.ndarray, ...]:
        return (*(field.numpy() for field in self.fields), self.mask.numpy())

    def rows(self, chosen: Tensor | slice) -> Batch:
        return Batch([field[chosen] for field in self.fields], self.mask[chosen])

    def packed(self) -> list[list[float]]:
        """The real values of each field, in reading order: the same however the batch is padded."""
        return [field[self.mask].tolist() for field in self.fields]


@st.composite
def batches(draw: st.DrawFn, fields: int) -> Batch:
    """Left-aligned rows of up to 5 real values, none included; padding holds arbitrary finite numbers."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    count = fields * rows * width
    values = draw(st.lists(NUMBERS, min_size=count, max_size=count))
    tensor = torch.tensor(values, dtype=torch.float64).reshape(fields, rows, width)
    return Batch(list(tensor), torch.arange(width) < torch.tensor(lengths)[:, None])


@dataclass
class Layout:
    """Another way to pad the same real values."""

    extra: int
    side: str
    junk: float

    def __call__(self, batch: Batch) -> Batch:
        rows, width = batch.mask.shape
        lengths = batch.mask.sum(1, keepdim=True)
        places = torch.arange(width + self.extra)
        mask = places < lengths if self.side == "right" else places >= width + self.extra - lengths
        fields = []
        for field in batch.fields:
            padded = torch.full((rows, width + self.extra), self.junk, dtype=torch.float64)
            padded[mask] = field[batch.mask]
            fields.append(padded)
        return Batch(fields, mask)


LAYOUTS = st.builds(Layout, st.integers(0, 3), st.sampled_from(["left", "right"]), JUNK)


def total_and_gradients(formula: Formula, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The masked sum of an element-wise formula, used as a trainer does, and its gradient to each input."""
    leaves = [field.clone().requires_grad_() for field in batch.fields]
    total = masked_sum(formula(*(zero_padding(leaf, batch.mask) for leaf in leaves)), batch.mask)
    if total.requires_grad:
        total.backward()
    return total.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def assert_same_numbers(got: Tensor, expected: Tensor) -> None:
    """But for the last bits: torch computes the last few places of a tensor by other instructions than the rest."""
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def check_padding_is_silent(formula: Formula, batch: Batch, layout: Layout) -> None:
    """Amount, side and content of padding change no value and no gradient, and padding gets none."""
    total, gradients = total_and_gradients(formula, batch)
    other = layout(batch)
    other_total, other_gradients = total_and_gradients(formula, other)
    torch.testing.assert_close(other_total, total)
    for gradient, other_gradient in zip(gradients, other_gradients, strict=True):
        assert_same_numbers(other_gradient[other.mask], gradient[batch.mask])
        assert torch.equal(other_gradient[~other.mask], torch.zeros_like(other_gradient[~other.mask]))


def check_rows_add_up(formula: Formula, batch: Batch, order: list[int], cut: int) -> None:
    """Shuffled rows, cut into two micro-batches, have the sum and the gradients of the whole."""
    total, gradients = total_and_gradients(formula, batch)
    shuffled = batch.rows(torch.tensor(order))
    parts = [shuffled.rows(slice(None, cut)), shuffled.rows(slice(cut, None))]
    results = [total_and_gradients(formula, part) for part in parts]
    torch.testing.assert_close(results[0][0] + results[1][0], total)
    for k, gradient in enumerate(gradients):
        parts_gradient = torch.cat([results[0][1][k], results[1][1][k]])
        assert_same_numbers(parts_gradient, gradient[torch.tensor(order)])


@st.composite
def splits(draw: st.DrawFn, fields: int) -> tuple[Batch, list[int], int]:
    """A batch, an order of its rows, and where to cut."""
    batch = draw(batches(fields))
    rows = len(batch.mask)
    return batch, draw(st.permutations(range(rows))), draw(st.integers(0, rows))
