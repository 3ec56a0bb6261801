"""Sets of tokens in few words, and scores under them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.unit.functional.properties import QUICK
from trlx_like.functional.choices import Choices, by_row, encode, mask_width, spans
from trlx_like.functional.logprobs import divergence_from_hidden, score_tokens


def test_words_by_hand() -> None:
    # Of 70 tokens a mask has ceil(70 / 32) = 3 words. {1, 69} is a list of two ids. {0, 31, 32, 69} has four, so it is
    # a mask: bits 0 and 31 of the first word (1 - 2^31, as a signed number), 0 of the second, 69 - 64 = 5 of the third.
    possible = torch.zeros(2, 70, dtype=torch.bool)
    possible[0, [1, 69]] = True
    possible[1, [0, 31, 32, 69]] = True
    words, sizes = encode(possible)
    assert words.tolist() == [1, 69, 1 - 2**31, 1, 32] and words.dtype == torch.int32
    assert sizes.tolist() == [2, 3]
    places = torch.tensor([[0, 2], [2, 3]])
    assert Choices(words, places).possible(places.flip(0), 70).equal(possible.flip(0))


def test_rows_by_hand() -> None:
    # Two rows and two positions of 70 tokens. The second row has one real token, so what follows it is dropped.
    steps = []
    for sets in ([[3], [4, 5]], [[6, 7], [8]]):
        possible = torch.zeros(2, 70, dtype=torch.bool)
        for row, tokens in enumerate(sets):
            possible[row, tokens] = True
        steps.append(encode(possible))
    words, sizes = by_row(steps, torch.tensor([[True, True], [True, False]]))
    assert words.tolist() == [[3, 6, 7], [4, 5, 0]] and sizes.tolist() == [[1, 2], [2, 0]]
    # In the flattened words, of which each row has three.
    assert spans(words, sizes)[:, :, 0].tolist() == [[0, 1], [3, 5]]


@st.composite
def sets(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets [B, R, V] of which each has a token, few or many, and the mask [B, R] of responses with a token each."""
    rows, width, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 140))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    share = torch.rand(rows, width, 1, generator=random) ** 4
    possible = torch.rand(rows, width, vocabulary, generator=random) < share
    possible.scatter_(2, torch.randint(vocabulary, (rows, width, 1), generator=random), True)
    lengths = torch.tensor(draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows)))
    return possible, torch.arange(width) < lengths[:, None]


@QUICK
@given(sets())
def test_what_is_encoded_comes_back_in_few_words(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    possible, mask = drawn
    vocabulary = possible.shape[2]
    words, sizes = by_row([encode(step) for step in possible.unbind(dim=1)], mask)
    assert words.shape[1] == int(sizes.sum(dim=1).max()) and (sizes > 0).equal(mask)
    assert bool((sizes <= possible.sum(dim=2)).all()) and int(sizes.max()) <= mask_width(vocabulary)
    places = spans(words, sizes)[mask]
    assert Choices(words.flatten(), places).possible(places, vocabulary).equal(possible[mask])


@QUICK
@given(st.integers(0, 10**6), st.integers(1, 90), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 200))
def test_scores_are_those_of_float64_over_the_set(seed: int, vocabulary: int, temperature: float, chunk: int) -> None:
    random = torch.Generator().manual_seed(seed)
    count = 5
    hidden, other = torch.randn(2, count, vocabulary, generator=random).unbind()
    possible = torch.rand(count, vocabulary, generator=random) < 0.3
    ids = torch.randint(vocabulary, (count, 1), generator=random)
    possible.scatter_(1, ids, True)
    words, sizes = encode(possible)
    choices = Choices(words, torch.stack([sizes.cumsum(0) - sizes, sizes], dim=1))
    hidden.requires_grad_()
    options: dict[str, Any] = {"temperature": temperature, "choices": choices, "chunk_elements": chunk}
    scores = score_tokens(hidden, ids[:, 0], lambda h: h, entropy=True, statistics=True, **options)
    kl = divergence_from_hidden(hidden, other, lambda h: h, lambda h: h, **options)
    assert scores.entropy is not None
    (scores.logprobs.sum() + scores.entropy.sum() + kl.sum()).backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all() and (hidden.grad[~possible] == 0).all()
    for row in range(count):
        members = possible[row].numpy()
        policy, reference = (
            np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            for z in (x[row].detach().double().numpy()[members] / temperature for x in (hidden, other))
        )
        place = int(members[: int(ids[row])].sum())
        assert float(scores.logprobs[row].detach()) == pytest.approx(np.log(policy[place]), abs=2e-5)
        assert float(scores.entropy[row].detach()) == pytest.approx(-(policy * np.log(policy)).sum(), abs=2e-5)
        assert float(kl[row].detach()) == pytest.approx((policy * np.log(policy / reference)).sum(), abs=2e-5)


def test_scores_by_hand() -> None:
    # Probabilities 1/6, 2/6, 3/6; without the first they are 2/5 and 3/5.
    logits = torch.tensor([[1.0, 2.0, 3.0]]).log()
    words, sizes = encode(torch.tensor([[False, True, True]]))
    choices = Choices(words, torch.stack([torch.zeros_like(sizes), sizes], dim=1))
    for token, expected in enumerate([-float("inf"), np.log(2 / 5), np.log(3 / 5)]):
        score = score_tokens(logits, torch.tensor([token]), lambda h: h, choices=choices).logprobs
        assert float(score) == pytest.approx(expected)
