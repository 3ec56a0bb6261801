"""Token log-probabilities, entropy and exact KL by chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.unit.functional import reference_numpy as reference
from tests.unit.functional.properties import QUICK
from trlx_like.functional.choices import Choices, encode
from trlx_like.functional.kl import full_kl
from trlx_like.functional.logprobs import (
    CHUNK_ELEMENTS,
    Head,
    _score_logits,
    by_chunks,
    divergence_from_hidden,
    score_tokens,
    vocabulary_of,
)
from trlx_like.functional.masked import masked_sum
from trlx_like.functional.policy_gradient import clipped_surrogate

VOCABULARY, HIDDEN = 7, 3
SEEDS = st.integers(0, 2**31)
CHUNKS = st.sampled_from([1, VOCABULARY, 2 * VOCABULARY, 5 * VOCABULARY - 1, 2**24])
TEMPERATURES = st.sampled_from([0.5, 1.0, 1.7])

# Head: identity. Probabilities 1/8, 2/8, 5/8.
GOLDEN = torch.tensor([[1.0, 2.0, 5.0]]).log()


def identity(hidden: Tensor) -> Tensor:
    return hidden


class Problem:
    """Random hidden states, tokens, head and table of allowed tokens, in float64."""

    def __init__(self, seed: int, count: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
        self.ids = torch.randint(VOCABULARY, (count,), generator=generator)
        self.previous = torch.randint(VOCABULARY, (count,), generator=generator)
        self.allowed = torch.rand(VOCABULARY, VOCABULARY, generator=generator) < 0.6
        self.allowed[self.previous, self.ids] = True
        self.weights = torch.randn(2, count, generator=generator, dtype=torch.float64)

    def score(self, temperature: float, masked: bool, chunk: int) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities and entropy; gradients of a weighted sum of both to hidden states and head."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        scores = score_tokens(
            hidden,
            self.ids,
            lambda h: h @ weight.T,
            temperature=temperature,
            allowed=self.allowed if masked else None,
            previous=self.previous if masked else None,
            entropy=True,
            chunk_elements=chunk,
        )
        assert scores.entropy is not None
        ((scores.logprobs * self.weights[0]).sum() + (scores.entropy * self.weights[1]).sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        return [scores.logprobs.detach(), scores.entropy.detach()], [hidden.grad, weight.grad]


def test_golden() -> None:
    # ln(2/8) = -1.3862944. Entropy (ln 8) / 8 + (ln 4) / 4 + 5/8 ln(8/5) = 0.2599302 + 0.3465736 + 0.2937523.
    scores = score_tokens(GOLDEN, torch.tensor([1]), identity, entropy=True)
    torch.testing.assert_close(scores.logprobs, torch.tensor([-1.3862944]))
    torch.testing.assert_close(scores.entropy, torch.tensor([0.9002561]))
    assert score_tokens(GOLDEN, torch.tensor([1]), identity).entropy is None


def test_statistics_golden() -> None:
    # (1 + 4 + 25) / 64 of drawing the same twice, ln of it -0.7576857. Mean logit (0 + ln 2 + ln 5) / 3 = 0.7675284.
    tokens = torch.tensor([1, 2])
    got = score_tokens(GOLDEN.repeat(2, 1).requires_grad_(), tokens, identity, statistics=True, chunk_elements=3)
    assert got.statistics is not None and got.logprobs.requires_grad
    torch.testing.assert_close(got.statistics.entropy, torch.tensor([0.9002561] * 2))
    torch.testing.assert_close(got.statistics.log_collision, torch.tensor([-0.7576857] * 2))
    torch.testing.assert_close(got.statistics.mean_logit, torch.tensor([0.7675284] * 2))
    assert got.statistics.is_likeliest.tolist() == [False, True]
    assert not any(column.requires_grad for column in vars(got.statistics).values())
    assert score_tokens(GOLDEN, tokens[:1], identity).statistics is None


def test_statistics_of_allowed_tokens_golden() -> None:
    # The first is forbidden: 2/7 and 5/7. Entropy 2/7 ln(7/2) + 5/7 ln(7/5) = 0.3579323 + 0.2403374.
    allowed, previous = torch.tensor([[False, True, True]] * 3), torch.tensor([0])
    ids = torch.tensor([2])
    got = score_tokens(GOLDEN, ids, identity, statistics=True, allowed=allowed, previous=previous).statistics
    assert got is not None
    torch.testing.assert_close(got.entropy, torch.tensor([0.5982696]))
    torch.testing.assert_close(got.log_collision, torch.tensor([29 / 49]).log())
    torch.testing.assert_close(got.mean_logit, torch.tensor([math.log(10) / 2]))
    assert got.is_likeliest.tolist() == [True]


def test_statistics_are_of_each_row() -> None:
    """Of three rows one has a forbidden token, and in one all are equally likely."""
    rows = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0], [1.0, 2.0, 5.0]]).log()
    allowed, previous = torch.tensor([[False, True, True], [True, True, True], [True] * 3]), torch.tensor([0, 1, 2])
    ids = torch.tensor([2, 0, 1])
    got = score_tokens(rows, ids, identity, statistics=True, allowed=allowed, previous=previous).statistics
    assert got is not None
    torch.testing.assert_close(got.mean_logit, torch.tensor([math.log(10) / 2, 0.0, math.log(10) / 3]))
    assert got.is_likeliest.tolist() == [True, True, False]


def test_statistics_of_many_rows_are_those_of_each_in_float64() -> None:
    """Some rows have forbidden tokens, and the last chunk is smaller."""
    vocabulary, count = 1000, 137
    logits = 3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(0))
    ids = logits.argmax(dim=-1).where(torch.arange(count) % 2 == 0, 0)
    allowed = torch.ones(vocabulary, vocabulary, dtype=torch.bool)
    allowed[1, 500:] = False
    previous = (torch.arange(count) % 50 == 3).long()
    got = score_tokens(
        logits, ids, identity, statistics=True, chunk_elements=50 * vocabulary, allowed=allowed, previous=previous
    ).statistics
    assert got is not None
    for row in range(count):
        kept = logits[row][allowed[previous[row]]].double()
        probabilities = kept.softmax(dim=-1)
        wanted = [-(probabilities * probabilities.log()).sum(), probabilities.square().sum().log(), kept.mean()]
        found = [got.entropy[row], got.log_collision[row], got.mean_logit[row]]
        torch.testing.assert_close(torch.stack(found).double(), torch.stack(wanted), rtol=1e-5, atol=1e-5)
        assert bool(got.is_likeliest[row]) == (int(kept.argmax()) == int(ids[row]))


@pytest.mark.parametrize("forbidden", [-torch.inf, 0.0])
def test_scores_of_logits_of_more_dimensions_are_those_of_their_rows(forbidden: float) -> None:
    """[B, R, V], as a whole batch is scored, where two of the tokens are forbidden and where none is."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 2] = logits[1, 0, 4] = forbidden
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    logprobs, entropy, seen = _score_logits(logits, ids, entropy=True, statistics=True)
    row_logprobs, row_entropy, row_seen = _score_logits(logits.view(6, 5), ids.view(6), entropy=True, statistics=True)
    assert entropy is not None and row_entropy is not None and seen is not None and row_seen is not None
    for found, wanted in zip((logprobs, entropy, *seen), (row_logprobs, row_entropy, *row_seen), strict=True):
        assert found.shape == (2, 3)
        torch.testing.assert_close(found.view(6), wanted)
    other = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(full_kl(logits, other).view(6), full_kl(logits.view(6, 5), other.view(6, 5)))


def test_temperature_golden() -> None:
    # T = 1/2 squares the weights: 1, 4, 25 of 30. ln(4/30) = -2.0149030.
    scores = score_tokens(GOLDEN, torch.tensor([1]), identity, temperature=0.5)
    torch.testing.assert_close(scores.logprobs, torch.tensor([-2.0149030]))
    # T = 2 takes roots: 1, 2, 3 of 6.
    scores = score_tokens(torch.tensor([[1.0, 4.0, 9.0]]).log(), torch.tensor([1]), identity, temperature=2.0)
    torch.testing.assert_close(scores.logprobs, torch.tensor([1 / 3]).log())


def test_tokens_outside_the_set_that_was_drawn_from_are_forbidden() -> None:
    """Of 40 tokens with the weights 1, 2, 5, 1, ... sets of one (a list of ids) and of three (a mask)."""
    weights = torch.ones(40)
    weights[1:3] = torch.tensor([2.0, 5.0])
    possible = torch.zeros(3, 40, dtype=torch.bool)
    possible[0, 2] = possible[1, :3] = possible[2, 1:3] = True
    words, sizes = encode(possible)
    spans = torch.stack([sizes.cumsum(0) - sizes, sizes], dim=1)
    ids = torch.tensor([2, 2, 1])
    scores = score_tokens(weights.log().repeat(3, 1), ids, identity, choices=Choices(words, spans), entropy=True)
    torch.testing.assert_close(scores.logprobs, torch.tensor([1.0, 5 / 8, 2 / 7]).log())
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy, torch.tensor([0.0, 0.9002561, 0.5982696]))


def test_allowed_golden() -> None:
    # After 2 the third token is forbidden: 1/3, 2/3. ln(2/3) = -0.4054651; entropy 0.6365142. After 0: none.
    allowed = torch.tensor([[True, True, True], [False, False, False], [True, True, False]])
    scores = score_tokens(
        GOLDEN.expand(3, 3),
        torch.tensor([1, 1, 2]),
        identity,
        allowed=allowed,
        previous=torch.tensor([2, 0, 2]),
        entropy=True,
    )
    torch.testing.assert_close(scores.logprobs, torch.tensor([-0.4054651, -1.3862944, -torch.inf]))
    torch.testing.assert_close(scores.entropy, torch.tensor([0.6365142, 0.9002561, 0.6365142]))


def test_a_forbidden_token_gives_no_nan_gradient() -> None:
    hidden = GOLDEN.clone().requires_grad_()
    scores = score_tokens(
        hidden,
        torch.tensor([2]),
        identity,
        allowed=torch.tensor([[True, True, False]]),
        previous=torch.tensor([0]),
        entropy=True,
    )
    assert scores.entropy is not None and scores.logprobs.item() == -torch.inf
    (scores.logprobs + scores.entropy).sum().backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all() and hidden.grad[0, 2] == 0


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(ValueError, match=rf"temperature \({temperature}\) must be above 0"):
        score_tokens(GOLDEN, torch.tensor([1]), identity, temperature=temperature)


def test_a_table_needs_previous_tokens() -> None:
    with pytest.raises(ValueError, match="allowed and previous must be given together"):
        score_tokens(GOLDEN, torch.tensor([1]), identity, allowed=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="allowed and previous must be given together"):
        divergence_from_hidden(GOLDEN, GOLDEN, identity, identity, previous=torch.tensor([1]))


def test_half_precision_logits_are_scored_in_float32() -> None:
    problem = Problem(0)
    hidden, weight = problem.hidden.bfloat16(), problem.weight.bfloat16()
    scores = score_tokens(hidden, problem.ids, lambda h: h @ weight.T)
    logits = (hidden @ weight.T).float()
    assert torch.equal(scores.logprobs, logits.log_softmax(-1)[torch.arange(5), problem.ids])


def test_no_tokens() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    scores = score_tokens(hidden, torch.zeros(0, dtype=torch.int64), identity, entropy=True)
    assert scores.entropy is not None
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert hidden.grad is not None


@QUICK
@given(SEEDS, TEMPERATURES, st.booleans(), CHUNKS)
def test_equals_numpy_for_every_chunk_size(seed: int, temperature: float, masked: bool, chunk: int) -> None:
    problem = Problem(seed)
    (logprobs, entropy), _ = problem.score(temperature, masked, chunk)
    logits = (problem.hidden @ problem.weight.T).numpy()
    table = problem.allowed.numpy()
    for i, row in enumerate(logits):
        probs = reference.distribution(row, temperature, table[problem.previous[i]] if masked else None)
        assert logprobs[i].item() == pytest.approx(math.log(probs[problem.ids[i]]), abs=1e-9)
        assert entropy[i].item() == pytest.approx(reference.entropy(probs), abs=1e-9)


@QUICK
@given(SEEDS, TEMPERATURES, st.booleans(), CHUNKS)
def test_gradients_do_not_depend_on_the_chunks(seed: int, temperature: float, masked: bool, chunk: int) -> None:
    problem = Problem(seed)
    torch.testing.assert_close(problem.score(temperature, masked, chunk), problem.score(temperature, masked, 2**24))


@QUICK
@given(SEEDS, TEMPERATURES, st.booleans(), CHUNKS)
def test_the_gradient_of_a_frozen_head_comes_with_the_scores(
    seed: int, temperature: float, masked: bool, chunk: int
) -> None:
    problem = Problem(seed)
    table: dict[str, Any] = {"allowed": problem.allowed, "previous": problem.previous} if masked else {}
    calls: list[int] = []

    def gradient(weight: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        def head(hidden: Tensor) -> Tensor:
            calls.extend([len(hidden)] * (len(hidden) > 0))
            return 3 * torch.tanh(hidden @ weight.T + 0.1)  # bias and soft-capping

        hidden = problem.hidden.clone().requires_grad_()
        scores = score_tokens(hidden, problem.ids, head, temperature=temperature, chunk_elements=chunk, **table)
        (scores.logprobs * problem.weights[0]).sum().backward()
        assert hidden.grad is not None
        return scores.logprobs.detach(), hidden.grad

    whole = gradient(problem.weight, 2**24)
    calls.clear()
    frozen = gradient(problem.weight, chunk)
    for got, expected in zip(frozen, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    rows = max(1, chunk // VOCABULARY)
    assert len(calls) == math.ceil(5 / rows)  # each chunk once, and the rows of a trained head again
    calls.clear()
    gradient(problem.weight.clone().requires_grad_(), chunk)
    assert len(calls) == math.ceil(5 / rows) * (2 if rows < 5 else 1)


@pytest.mark.parametrize("chunk", [2 * VOCABULARY, 2**24])
def test_gradients_equal_finite_differences(chunk: int) -> None:
    problem = Problem(1)
    allowed, previous = problem.allowed, problem.previous

    def logprobs_and_entropy(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_tokens(
            hidden,
            problem.ids,
            lambda h: h @ weight.T,
            temperature=0.7,
            allowed=allowed,
            previous=previous,
            entropy=True,
            chunk_elements=chunk,
        )
        assert scores.entropy is not None
        return scores.logprobs, scores.entropy

    def kl(hidden: Tensor, weight: Tensor) -> Tensor:
        return divergence_from_hidden(
            hidden,
            problem.hidden + 1,
            lambda h: h @ weight.T,
            lambda h: h @ problem.weight.T,
            temperature=0.7,
            allowed=allowed,
            previous=previous,
            chunk_elements=chunk,
        )

    leaves = (problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_())
    assert torch.autograd.gradcheck(logprobs_and_entropy, leaves)
    assert torch.autograd.gradcheck(kl, leaves)


@QUICK
@given(SEEDS, st.permutations(range(5)), st.integers(0, 5))
def test_rows_do_not_meet(seed: int, order: list[int], cut: int) -> None:
    problem = Problem(seed)
    whole = score_tokens(problem.hidden, problem.ids, lambda h: h @ problem.weight.T).logprobs
    parts = [
        score_tokens(problem.hidden[rows], problem.ids[rows], lambda h: h @ problem.weight.T).logprobs
        for rows in (order[:cut], order[cut:])
    ]
    torch.testing.assert_close(torch.cat(parts), whole[order])


@QUICK
@given(
    SEEDS,
    st.sampled_from([float("nan"), float("inf"), 1e30]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_hidden_states_at_padding_change_nothing(seed: int, junk: float, real: list[bool]) -> None:
    # As the trainers do it: only real places are scored, wherever they lie in the batch.
    problem, mask = Problem(seed), torch.tensor(real)
    gradients = []
    for value in (junk, 0.0):
        hidden = torch.where(mask[:, None], problem.hidden, value).requires_grad_()
        weight = problem.weight.clone().requires_grad_()
        logprobs = score_tokens(hidden[mask], problem.ids[mask], partial(torch.matmul, other=weight.T)).logprobs
        logprobs.sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        assert (hidden.grad[~mask] == 0).all()
        gradients.append((hidden.grad, weight.grad, logprobs.detach()))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_table_that_allows_everything_changes_no_bit() -> None:
    problem = Problem(3)
    scored = score_tokens(problem.hidden, problem.ids, lambda h: h @ problem.weight.T, temperature=0.7)
    table = torch.ones(VOCABULARY, VOCABULARY, dtype=torch.bool)
    free = score_tokens(
        problem.hidden,
        problem.ids,
        lambda h: h @ problem.weight.T,
        temperature=0.7,
        allowed=table,
        previous=problem.previous,
    )
    assert torch.equal(free.logprobs, scored.logprobs)


def test_fresh_experience_has_the_plain_policy_gradient() -> None:
    problem = Problem(4)
    weight, advantages = problem.weight.clone().requires_grad_(), problem.weights[0]
    mask = torch.tensor([True, True, False, True, False])
    logprobs = score_tokens(problem.hidden, problem.ids, lambda h: h @ weight.T, chunk_elements=14).logprobs
    surrogate = masked_sum(clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2), mask)
    (got,) = torch.autograd.grad(surrogate, weight, retain_graph=True)
    (expected,) = torch.autograd.grad(-(advantages * logprobs)[mask].sum(), weight)
    torch.testing.assert_close(got, expected)


def test_full_kl_golden() -> None:
    # (1/2, 1/2) against (1/4, 3/4): 0.1438410. At T = 1/2 the second is (1/10, 9/10):
    # ln 5 / 2 + ln(5/9) / 2 = 0.5108256.
    p, q = torch.tensor([[1.0, 1.0]]).log(), torch.tensor([[1.0, 3.0]]).log()
    torch.testing.assert_close(divergence_from_hidden(p, q, identity, identity), torch.tensor([0.1438410]))
    cold = divergence_from_hidden(p, q, identity, identity, temperature=0.5)
    torch.testing.assert_close(cold, torch.tensor([0.5108256]))


@QUICK
@given(SEEDS, TEMPERATURES, CHUNKS)
def test_full_kl_equals_numpy_and_trains_the_policy_only(seed: int, temperature: float, chunk: int) -> None:
    problem, other = Problem(seed), Problem(seed + 1)
    leaves = [t.clone().requires_grad_() for t in (problem.hidden, problem.weight, other.hidden, other.weight)]
    hidden, weight, ref_hidden, ref_weight = leaves
    kl = divergence_from_hidden(
        hidden,
        ref_hidden,
        lambda h: h @ weight.T,
        lambda h: h @ ref_weight.T,
        temperature=temperature,
        allowed=problem.allowed,
        previous=problem.previous,
        chunk_elements=chunk,
    )
    kl.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert ref_hidden.grad is None and ref_weight.grad is None
    for i in range(len(kl)):
        row = problem.allowed[problem.previous[i]].numpy()
        policy, ref = (
            reference.distribution((p.hidden[i] @ p.weight.T).numpy(), temperature, row) for p in (problem, other)
        )
        assert kl[i].item() == pytest.approx(reference.kl(policy, ref), abs=1e-9)


def test_full_kl_of_the_policy_to_itself_is_exactly_zero() -> None:
    problem = Problem(5)
    hidden, weight = problem.hidden.float(), problem.weight.float()
    kl = divergence_from_hidden(hidden, hidden, lambda h: h @ weight.T, lambda h: h @ weight.T, temperature=0.7)
    assert kl.tolist() == [0.0] * 5


def test_chunks_have_as_many_rows_as_asked_for() -> None:
    assert CHUNK_ELEMENTS * 4 == 64 * 2**20  # bytes in float32
    seen = []

    def head(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden

    with torch.no_grad():
        divergence_from_hidden(GOLDEN.repeat(4, 1), GOLDEN.repeat(4, 1), head, identity, chunk_elements=4 * 3)
    assert seen == [0, 2, 2]  # none to count the vocabulary; then both sides together are as many as asked for
    assert by_chunks(lambda a, b: len(b), [None, torch.zeros(3)], 1, 2) == [2, 1]
    assert by_chunks(len, [torch.zeros(1)], 1, 1) == [1]
    assert by_chunks(len, [torch.zeros(0)], 1, 1) == [0]


@pytest.mark.parametrize(("again", "calls"), [({}, 4), ({"again": True}, 4), ({"again": False}, 2)])
def test_chunks_are_computed_again_in_the_backward_pass(again: dict[str, bool], calls: int) -> None:
    seen = []

    def square(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return rows.square().sum()

    rows = torch.ones(2, requires_grad=True)
    torch.stack(by_chunks(square, [rows], 1, 1, **again)).sum().backward()
    assert len(seen) == calls and rows.grad is not None and rows.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("chunk", [2 * VOCABULARY, 5 * VOCABULARY - 1, 1])
def test_no_more_logits_are_made_at_once_than_asked_for(chunk: int) -> None:
    problem, made = Problem(6), []

    def head(hidden: Tensor) -> Tensor:
        made.append(len(hidden) * VOCABULARY)
        return hidden @ problem.weight.T

    score_tokens(problem.hidden, problem.ids, head, chunk_elements=chunk)
    assert sum(made) == 5 * VOCABULARY and max(made) <= max(chunk, VOCABULARY)
    made.clear()
    divergence_from_hidden(problem.hidden, problem.hidden, head, head, chunk_elements=chunk)
    # Policy and reference are alive together.
    assert sum(made) == 2 * 5 * VOCABULARY and 2 * max(made) <= max(chunk, 2 * VOCABULARY)


# N tokens of a vocabulary V: all logits at once are N V 4 bytes = 250 MiB.
N, V, H = 2048, 32_000, 64
ALL_LOGITS = N * V * 4


def peak_bytes(step: Callable[[], None], folder: Path) -> int:
    """The most that torch's CPU allocator held during `step`, above what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    trace = folder / "trace.json"
    profiled.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    first = min(events, key=lambda event: event["ts"])["args"]
    peak = max(int(event["args"]["Total Allocated"]) for event in events)
    return peak - (first["Total Allocated"] - first["Bytes"])


def backward_of_tokens(chunk_elements: int, vocabulary: int = V) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, requires_grad=True)
    head = torch.nn.Linear(H, vocabulary, bias=False)
    ids = torch.randint(vocabulary, (N,), generator=generator)
    return lambda: score_tokens(hidden, ids, head, chunk_elements=chunk_elements).logprobs.sum().backward()


def test_memory_is_that_of_a_chunk(tmp_path: Path) -> None:
    # A chunk of 2^22 logits is 16 MiB. Six of them, and two gradients of the head (8 MiB each), are 112 MiB.
    bound = 6 * 2**22 * 4 + 2 * H * V * 4
    assert bound < ALL_LOGITS / 2
    assert peak_bytes(backward_of_tokens(2**22), tmp_path) < bound
    # The same call in one chunk shows that the measure sees what it should: logits, softmax and its gradient.
    assert peak_bytes(backward_of_tokens(2**30), tmp_path) > 2 * ALL_LOGITS


def test_memory_with_a_large_vocabulary(tmp_path: Path) -> None:
    """Qwen's 151,936 tokens, whose logits would be 1,187 MiB at once, scored with their gradients."""
    assert peak_bytes(backward_of_tokens(CHUNK_ELEMENTS, 151_936), tmp_path) < 350 * 2**20


def test_the_head_of_a_model_is_asked_once_for_its_vocabulary() -> None:
    """Once for each width of states, and for all heads of the same model; others are asked each time."""
    asked: list[int] = []

    def head_of(model: object, vocabulary: int) -> Head:
        def head(hidden: Tensor) -> Tensor:
            if not len(hidden):
                asked.append(vocabulary)
            return hidden[:, :1].expand(-1, vocabulary)

        if model is not None:
            head.of_model = model  # type: ignore[attr-defined]
        return head

    model, states = torch.nn.Linear(1, 1), torch.zeros(3, 4)
    assert [vocabulary_of(head_of(model, 7), states) for _ in range(3)] == [7] * 3 and asked == [7]
    assert vocabulary_of(head_of(model, 9), states[:, :2]) == 9 and asked == [7, 9]
    alone = head_of(None, 5)
    assert [vocabulary_of(alone, states) for _ in range(2)] == [5] * 2 and asked == [7, 9, 5, 5]
