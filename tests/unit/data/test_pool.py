"""The pool of responses: filed by prompt, repetitions held once, the same after a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings, strategies as st

from tests.contract.runs import assert_same
from trlx_like.checkpoint import load_tree, save_tree
from trlx_like.data.pool import ResponsePool, ScoredResponse


def made(prompt: list[int], response: list[int], score: float) -> ScoredResponse:
    """Token 0 is special: it is not in the text."""
    return ScoredResponse(prompt, response, "".join(f"\u2014{token}" for token in response if token), score)


PROMPTS = st.lists(st.integers(5, 6), min_size=1, max_size=2)
IDS = st.lists(st.sampled_from([0, 1, 7, 150_000]), min_size=1, max_size=3)
MADE = st.lists(st.builds(made, PROMPTS, IDS, st.floats(-2, 2)), max_size=12)
LIMITS = st.one_of(st.none(), st.integers(1, 3))

A, B = [5, 5], [5]
SOME = [
    *(made(A, [1], 0.1), made(B, [1], 3.0), made(A, [1, 2], 0.2)),
    *(made(A, [1], 0.1), made(B, [9], 4.0), made(A, [3], 0.3)),
]


def filled(*batches: list[ScoredResponse], limit: int | None = None) -> ResponsePool:
    pool = ResponsePool(limit)
    for batch in batches:
        pool.extend(batch)
    return pool


def scores(pool: ResponsePool) -> list[list[float]]:
    return [of_prompt.tolist() for of_prompt in pool.scores()]


def test_scores_and_choice_by_hand() -> None:
    pool = filled(SOME[:2], SOME[2:])
    assert len(pool) == 6
    assert scores(pool) == [[0.1, 0.2, 0.1, 0.3], [3.0, 4.0]]
    assert pool.select(torch.tensor([0.1, 3.5], dtype=torch.float64)) == [(A, [1]), (A, [1, 2]), (A, [3]), (B, [9])]
    assert pool.select(torch.tensor([0.25, 5.0], dtype=torch.float64)) == [(A, [3])]


def test_the_same_ids_after_two_prompts_are_two_pairs() -> None:
    assert filled(SOME).select(torch.tensor([0.0, 0.0], dtype=torch.float64)).count((B, [1])) == 1
    assert filled(SOME).select(torch.tensor([0.0, 0.0], dtype=torch.float64)).count((A, [1])) == 1


def test_a_limited_pool_keeps_the_newest_of_each_prompt() -> None:
    pool = filled(SOME, limit=2)
    assert scores(pool) == [[0.1, 0.3], [3.0, 4.0]]
    pool.extend([made(B, [8], 1.0)])
    assert scores(pool) == [[0.1, 0.3], [4.0, 1.0]]


def test_a_response_that_scores_differently_each_time_is_kept_once_by_its_best() -> None:
    """A noisy reward: what counts is whether one of its scores reaches the threshold."""
    pool = filled([made(A, [1], 0.0), made(A, [1], 1.0), made(A, [2], 0.5)])
    assert pool.select(torch.tensor([0.7], dtype=torch.float64)) == [(A, [1])]


def test_the_same_text_is_the_same_response_with_the_ids_of_the_first() -> None:
    """Special tokens in between are not seen by a reward function, and must not multiply what it likes."""
    pool = filled([made(A, [1, 0, 2], 1.0), made(A, [1, 2], 1.0), made(A, [0, 1, 2, 0], 1.0), made(B, [1, 2], 1.0)])
    assert pool.select(torch.zeros(2)) == [(A, [1, 0, 2]), (B, [1, 2])]


def test_a_limited_pool_forgets_the_ids_that_nothing_refers_to() -> None:
    pool = filled([made(A, [1, 0], 1.0), made(A, [2], 1.0)], limit=1)
    pool.extend([made(A, [1], 1.0)])
    assert pool.select(torch.zeros(1)) == [(A, [1])]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(MADE, MADE)
def test_it_is_what_plain_lists_would_be(first: list[ScoredResponse], second: list[ScoredResponse]) -> None:
    pool = filled(first, second)
    plain: dict[tuple[int, ...], list[ScoredResponse]] = {}
    for response in (*first, *second):
        plain.setdefault(tuple(response.prompt), []).append(response)
    assert scores(pool) == [[response.score for response in of_prompt] for of_prompt in plain.values()]
    expected = []
    for of_prompt in plain.values():
        good = [response.text for response in of_prompt if response.score >= 0.5]
        texts = [text for at, text in enumerate(good) if text not in good[:at]]
        expected += [next((r.prompt, r.response) for r in of_prompt if r.text == text) for text in texts]
    assert pool.select(torch.full([len(plain)], 0.5)) == expected


@settings(max_examples=25, deadline=None, derandomize=True)
@given(MADE, MADE, LIMITS)
def test_it_goes_on_from_a_checkpoint(
    first: list[ScoredResponse], second: list[ScoredResponse], limit: int | None
) -> None:
    """Written, read and extended: the same state, bit by bit, as without the stop."""
    pool, resumed = filled(first, limit=limit), ResponsePool(limit)
    resumed.load_state_dict(pool.state_dict())
    pool.extend(second)
    resumed.extend(second)
    assert_same(resumed.state_dict(), pool.state_dict())
    everything = torch.full([len(pool.scores())], -9.0)
    assert resumed.select(everything) == pool.select(everything)


def test_its_state_is_fit_for_files(tmp_path: Path) -> None:
    for pool in (filled(SOME), ResponsePool()):
        save_tree(pool.state_dict(), tmp_path / "pool")
        read = ResponsePool()
        read.load_state_dict(load_tree(tmp_path / "pool"))
        assert_same(read.state_dict(), pool.state_dict())


def test_a_repetition_costs_a_number() -> None:
    long = list(range(500))
    state = filled([made(A, long, 0.5)] * 100).state_dict()
    assert len(state["responses"]["ids"]) == 500
    assert len(state["scores"]) == 100
