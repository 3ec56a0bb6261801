"""Advantages within groups, how tokens are weighed, and the penalty of long responses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional import groups_numpy as twin
from tests.unit.functional.properties import JUNK, QUICK, Batch, batches
from trlx_like.functional import group_advantages as ga

NAN = float("nan")

# Group 1: 1, 2, 6, mean 3, deviations -2, -1, 3, variance 14 / 2 = 7. Group 2: 4, 4, tied; an abstention.
# Leave one out: 1 - (2 + 6) / 2 = -3, 2 - 3.5 = -1.5, 6 - 1.5 = 4.5.
SCORES = torch.tensor([[1.0, 2.0, 6.0], [4.0, NAN, 4.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, True]])

KINDS = ("group", "batch", "none")


def advantages(scores: Tensor, mask: Tensor, kind: str) -> Tensor:
    """As GRPO makes them, and "rloo"."""
    if kind == "rloo":
        return ga.leave_one_out(scores, mask)
    centered = ga.group_centered(scores, mask)
    if kind == "none":
        return centered
    std = ga.group_stds(scores, mask) if kind == "group" else scores[mask].std() if mask.sum() > 1 else 0.0
    return ga.scaled(centered, std)


def test_centered_golden() -> None:
    assert ga.group_centered(SCORES, MASK).tolist() == [[-2, -1, 3], [0, 0, 0]]
    assert ga.group_means(SCORES, MASK).tolist() == [[3], [4]]


def test_deviations_golden() -> None:
    torch.testing.assert_close(ga.group_stds(SCORES, MASK), torch.tensor([[7**0.5], [0]], dtype=torch.float64))


def test_scaled_golden() -> None:
    # -2 / (sqrt 7 + 0.0001) = -2 / 2.6458513 = -0.7559003
    got = ga.scaled(ga.group_centered(SCORES, MASK), ga.group_stds(SCORES, MASK))
    torch.testing.assert_close(got[0, 0].item(), -0.7559003, rtol=1e-6, atol=0)
    assert got[1].tolist() == [0, 0, 0]


def test_leave_one_out_golden() -> None:
    assert ga.leave_one_out(SCORES, MASK).tolist() == [[-3, -1.5, 4.5], [0, 0, 0]]
    assert ga.leave_one_out(torch.tensor([[1.0, 4.0]]), torch.ones(1, 2).bool()).tolist() == [[-3, 3]]


def test_ties_golden() -> None:
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, False], [False] * 3])
    assert ga.group_ties(SCORES[[0, 1, 0, 1]], mask).flatten().tolist() == [False, True, True, True]


def test_equal_scores_teach_nothing_at_all() -> None:
    """Although the mean of three times 0.1 is not 0.1, and the quotient of two rounding errors may be anything."""
    for score in (0.1, 0.7, -3e7, 1e-30):
        for size in (3, 6, 7):
            scores = torch.full((1, size), score, dtype=torch.float32)
            mask = torch.ones(1, size, dtype=torch.bool)
            for kind in (*KINDS, "rloo"):
                assert advantages(scores, mask, kind).tolist() == [[0] * size]
            assert ga.group_stds(scores, mask).tolist() == [[0]]
            assert ga.best_of(scores, mask, 2)[1].tolist() == [[0] * size]


@pytest.mark.parametrize("junk", [NAN, torch.inf, 3.0])
def test_an_empty_group_is_zero(junk: float) -> None:
    """A group whose every score is missing, beside one with a single score."""
    scores, mask = torch.full((2, 3), junk), torch.tensor([[False] * 3, [False, True, False]])
    scores[1, 1] = 5.0
    assert ga.group_means(scores, mask).tolist() == [[0], [5]]
    assert ga.group_stds(scores, mask).tolist() == [[0], [0]]
    for made in (ga.group_centered(scores, mask), ga.leave_one_out(scores, mask), *ga.best_of(scores, mask, 2)):
        assert made.tolist() == [[0] * 3] * 2
    assert ga.group_ties(scores, mask).tolist() == [[True], [True]]
    assert ga.token_weights(mask, "grpo", max_length=3).tolist() == [[1], [1]]


@QUICK
@given(batches(1), st.sampled_from([*KINDS, "rloo"]), JUNK)
def test_advantages_are_those_of_the_twin(batch: Batch, kind: str, junk: float) -> None:
    scores = batch.fields[0].masked_fill(~batch.mask, junk)
    got = advantages(scores, batch.mask, kind)
    groups = [row[mask].tolist() for row, mask in zip(scores, batch.mask, strict=True) if mask.any()]
    expected = twin.rloo(groups) if kind == "rloo" else twin.grpo(groups, kind)
    torch.testing.assert_close(got[batch.mask], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert not got[~batch.mask].any()


@QUICK
@given(batches(1), st.sampled_from([*KINDS, "rloo"]), st.floats(-8, 8), st.permutations(range(5)))
def test_order_and_a_constant_change_nothing(batch: Batch, kind: str, constant: float, places: list[int]) -> None:
    """A constant added to the scores of one group; with the deviation of the batch, to all."""
    scores, mask = batch.fields[0], batch.mask
    before = advantages(scores, mask, kind)
    order = [place for place in places if place < scores.shape[1]]
    torch.testing.assert_close(advantages(scores[:, order], mask[:, order], kind), before[:, order])
    moved = scores.clone()
    moved[slice(None) if kind == "batch" else 0] += constant
    # Scores that differ by less than the constant's rounding become equal.
    torch.testing.assert_close(advantages(moved, mask, kind), before, rtol=1e-6, atol=1e-6)


@QUICK
@given(batches(1), st.sampled_from(["group", "none", "rloo"]))
def test_groups_do_not_know_each_other(batch: Batch, kind: str) -> None:
    whole = advantages(batch.fields[0], batch.mask, kind)
    for row in range(len(whole)):
        alone = batch.rows(slice(row, row + 1))
        torch.testing.assert_close(advantages(alone.fields[0], alone.mask, kind)[0], whole[row], rtol=1e-12, atol=1e-12)


@QUICK
@given(batches(1))
def test_advantages_of_a_group_add_up_to_nothing(batch: Batch) -> None:
    for kind in (*KINDS, "rloo"):
        total = advantages(batch.fields[0], batch.mask, kind).sum(dim=1)
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-6)


def test_best_of_golden() -> None:
    # Scores 1, 2, 6, k = 2. With 1: max(1, 2), max(1, 6), mean 4; with 2: 2, 6, mean 4; with 6: 6.
    # Two others than 1: 6; than 2: 6; than 6: 2. The second group is tied; the third has two scores, so k is 1 there.
    scores = torch.cat([SCORES, torch.tensor([[1.0, NAN, 4.0]])])
    mask = torch.cat([MASK, torch.tensor([[True, False, True]])])
    values, made = ga.best_of(scores, mask, 2)
    assert values[0].tolist() == [4, 4, 6]
    torch.testing.assert_close(made, torch.tensor([[-2.0, -2, 4], [0, 0, 0], [-3, 0, 3]], dtype=torch.float64))
    values, made = ga.best_of(scores, mask, 1)
    assert values is scores
    assert made.tolist() == ga.leave_one_out(scores, mask).tolist()


@QUICK
@given(batches(1), st.integers(2, 5), st.floats(-8, 8), JUNK)
def test_the_best_of_k_is_that_of_the_twin(batch: Batch, k: int, constant: float, junk: float) -> None:
    scores, mask = batch.fields[0], batch.mask
    values, made = ga.best_of(scores.masked_fill(~mask, junk), mask, k)
    groups = [row[real].tolist() for row, real in zip(scores, mask, strict=True) if real.any()]
    expected = torch.tensor([value - other for value, other in twin.best_of(groups, k)], dtype=torch.float64)
    torch.testing.assert_close(made[mask], expected, rtol=1e-9, atol=1e-9)
    assert not made[~mask].any()
    moved = ga.best_of(scores + constant, mask, k)[1]
    torch.testing.assert_close(moved, made, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("k", "size"), [(1, 2), (2, 3), (2, 4), (3, 4)])
def test_the_gradient_of_the_best_of_k_is_exact(k: int, size: int) -> None:
    """The mean over all samples of a policy with three outcomes is the gradient of the expected best, written out."""
    rewards = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    logits = torch.tensor([0.4, 0.1, -0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    p = logprobs.exp()
    low, middle, high = p.cumsum(0) ** k  # the chance that none of k is better
    expected = torch.autograd.grad(
        low * rewards[0] + (middle - low) * rewards[1] + (high - middle) * rewards[2], logits, retain_graph=True
    )[0]
    samples = torch.cartesian_prod(*[torch.arange(3)] * size)  # [3^size, size]
    _, made = ga.best_of(rewards[samples], torch.ones(samples.shape, dtype=torch.bool), k)
    chances = p[samples].prod(dim=1).detach()
    estimate = (chances[:, None] * k * made * logprobs[samples] / size).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


def test_prefix_golden() -> None:
    # Group 1 has scores 1, 2, 6, mean 3, leave-one-out advantages -3, -1.5, 4.5; the first two begin with token 5.
    # Second token, of the first: (-3 + 0 + (1 - 2)) / 2 = -2; of the second: (-1.5 + (2 - 1) + 0) / 2 = -0.25.
    # The third begins with 8, and ends there; nobody shares that. Group 2 begins with 5, 6 as well, alone in its group.
    scores = torch.tensor([1.0, 2, 6, 7], dtype=torch.float64)
    advantages = torch.tensor([-3, -1.5, 4.5, 0], dtype=torch.float64)
    tokens = torch.tensor([[5, 6, 3], [5, 7, 9], [8, 5, 5], [5, 6, 3]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, False], [True, True, True]])
    made = ga.prefix_advantages(scores, advantages, torch.tensor([0, 0, 0, 1]), tokens, mask)
    assert made[mask].tolist() == [-3, -2, -2, -1.5, -0.25, -0.25, 4.5, 0, 0, 0]


def test_a_short_response_does_not_share_the_padding_with_a_longer_one() -> None:
    scores = torch.tensor([0.0, 1.0], dtype=torch.float64)
    tokens, mask = torch.tensor([[5, 0, 0], [5, 0, 7]]), torch.tensor([[True, False, False], [True, True, True]])
    made = ga.prefix_advantages(scores, 2 * scores - 1, torch.zeros(2, dtype=torch.int64), tokens, mask)
    assert made[mask].tolist() == [-1, 1, 1, 1]  # both begin with 5: (1 + 1) / 2 = 1; after that each is alone


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, groups, tokens of a small vocabulary and mask of up to six responses."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    scores = draw(st.lists(st.integers(-4, 4), min_size=rows, max_size=rows))
    groups = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    tokens = draw(st.lists(st.integers(0, 1), min_size=rows * width, max_size=rows * width))
    lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.tensor(scores).double(), torch.tensor(groups), torch.tensor(tokens).reshape(rows, width), mask


@QUICK
@given(trees())
def test_prefix_advantages_are_those_of_the_twin(tree: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    scores, groups, tokens, mask = tree
    rows = [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]
    expected = twin.prefix(scores.tolist(), (-scores).tolist(), groups.tolist(), rows)
    made = ga.prefix_advantages(scores, -scores, groups, tokens, mask)
    torch.testing.assert_close(made[mask], torch.tensor(expected, dtype=torch.float64))


@QUICK
@given(trees(), st.permutations(range(6)), st.integers(0, 3), st.integers(0, 1), st.integers(-3, 3))
def test_prefix_advantages_know_neither_order_nor_padding_nor_the_level(
    tree: tuple[Tensor, Tensor, Tensor, Tensor], places: list[int], extra: int, junk: int, level: int
) -> None:
    scores, groups, tokens, mask = tree
    before = ga.prefix_advantages(scores, scores, groups, tokens, mask)
    assert before[:, 0].tolist() == scores.tolist()  # the first token has the advantage of the response
    order = [place for place in places if place < len(scores)]
    wider = torch.nn.functional.pad(tokens.masked_fill(~mask, junk), (0, extra), value=junk)
    other = torch.nn.functional.pad(mask, (0, extra))
    after = ga.prefix_advantages(scores[order] + level, scores[order], groups[order], wider[order], other[order])
    torch.testing.assert_close(after[other[order]], before[order][mask[order]])


def test_equal_scores_have_no_advantage_at_any_token() -> None:
    zeros, tokens = torch.zeros(3, dtype=torch.float64), torch.tensor([[1, 2], [1, 2], [1, 3]])
    made = ga.prefix_advantages(zeros, zeros, torch.zeros(3, dtype=torch.int64), tokens, torch.ones(3, 2).bool())
    assert made.tolist() == [[0, 0]] * 3
    assert ga.prefix_advantages(zeros[:0], zeros[:0], tokens[:0, 0], tokens[:0], tokens[:0].bool()).shape == (0, 2)


def test_token_weights_golden() -> None:
    # Responses of 1 and 3 tokens, losses 4 and 1, 2, 3; no response is longer than 5.
    # dapo 10 / 4 = 2.5; grpo (4 + 2) / 2 = 3; dr_grpo (4 / 5 + 6 / 5) / 2 = 1.
    mask = torch.tensor([[True, False, False], [True, True, True]])
    losses = torch.tensor([[4.0, 0, 0], [1, 2, 3]])
    wanted: dict[ga.LossType, float] = {"dapo": 2.5, "grpo": 3.0, "dr_grpo": 1.0}
    for kind, expected in wanted.items():
        weights = ga.token_weights(mask, kind, max_length=5)
        count = 4 if kind == "dapo" else 2
        assert weights.dtype == torch.float32
        assert ((weights * losses).sum() / count).item() == pytest.approx(expected)


@QUICK
@given(batches(1), st.sampled_from(["dapo", "grpo", "dr_grpo"]), st.data())
def test_a_batch_in_parts_has_the_loss_of_the_whole(batch: Batch, kind: ga.LossType, data: st.DataObject) -> None:
    batch = batch.rows(batch.mask.any(dim=1))
    count = float(batch.mask.sum() if kind == "dapo" else len(batch.mask))
    if not count:
        return
    cut = data.draw(st.integers(0, len(batch.mask)))
    total = 0.0
    for part in (batch.rows(slice(0, cut)), batch.rows(slice(cut, None))):
        weights = ga.token_weights(part.mask, kind, max_length=7)
        total += float((weights * part.fields[0])[part.mask].sum()) / count
    expected = twin.loss([row[mask].tolist() for row, mask in zip(batch.fields[0], batch.mask, strict=True)], kind, 7)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_overlong_punishment_golden() -> None:
    # Of 10 tokens the last 4 are punished: 6 not, 7 with 1/4, 10 with all.
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    assert ga.overlong_punishment(lengths, 10, 4).tolist() == [0, 0, -0.25, -0.5, -1, -1]


@QUICK
@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_overlong_punishment_is_that_of_the_twin(length: int, cache: int, more: int) -> None:
    longest = cache + more - 1
    got = ga.overlong_punishment(torch.tensor([length]), longest, cache).item()
    assert got == pytest.approx(twin.punishment(length, longest, cache), abs=1e-6)
