"""Exact values of walks on a small graph by hand, and against sampling and ILQL's table on larger ones."""

from __future__ import annotations

import numpy as np
import pytest

from examples.randomwalks.exact import END, States, guided_score, ilql_fixed_point
from examples.randomwalks.task import GOAL, LETTERS, RandomWalks
from tests.examples.test_randomwalks_task import graph


@pytest.fixture(scope="module")
def small() -> States:
    """b -> a, b -> c, c -> b: walks from b and from c to the goal a, with 2 and 3 nodes at best."""
    return States(RandomWalks(adjacency=graph("ba bc cb", nodes=3)))


def test_the_best_values_by_hand(small: States) -> None:
    q, v = small.best()
    b, c, a = (LETTERS.index(letter) for letter in "bca")
    assert v[small.number["b"]] == v[small.number["c"]] == v[small.number["ba"]] == 1.0
    assert q[small.number["b"], c] == pytest.approx(6 / 8)  # bcba: 4 nodes, (10 - 4) / (10 - 2)
    assert q[small.number["cbc"], b] == pytest.approx(5 / 7)  # cbcba: 5 nodes, (10 - 5) / (10 - 3)
    assert q[small.number["b"], b] == q[small.number["b"], END] == q[small.number["ba"], a] == 0.0
    assert q[small.number["ba"], END] == 1.0


def test_the_values_of_a_policy_are_what_its_walks_score(small: States) -> None:
    """Half of the moves in b go to a; the scores after 2, 4, 6 and 8 nodes are 8/8, 6/8, 4/8 and 2/8."""
    policy = small.random_walk()
    _, v = small.of(policy)
    assert v[small.number["b"]] == pytest.approx(1 / 2 + 6 / 8 / 4 + 4 / 8 / 8 + 2 / 8 / 16)
    visits = small.visits(policy)
    assert visits[small.number["bc"]] == pytest.approx(1 / 2 * 1 / 2)
    ends = visits * policy[:, END]
    assert ends @ small.scores == pytest.approx(v[small.start].mean())


def test_random_walks_score_as_the_data_does() -> None:
    task = RandomWalks(5)
    states = States(task)
    _, v = states.of(states.random_walk())
    scores = np.array(task.optimality(task.samples))
    assert abs(v[states.start].mean() - scores.mean()) < 4 * scores.std() / 1000**0.5


@pytest.mark.parametrize("number", [1, 3])
def test_the_fixed_point_of_ilql_finds_the_shortest_walks(number: int) -> None:
    """So where ILQL fails on these graphs neither the expectile nor the data is to blame."""
    task = RandomWalks(number)
    states, q, v = ilql_fixed_point(task, tau=0.8, gamma=0.99)
    policy = states.random_walk()
    best = np.where(policy > 0, q, -np.inf).argmax(axis=1)
    greedy = np.eye(policy.shape[1])[best]
    _, reached = states.of(greedy)
    assert reached[states.start].mean() == pytest.approx(1.0)
    moves = policy > 0
    above = q > v[:, None]
    inner = (states.length < 10) & (states.token != GOAL)
    pull = np.where(moves, np.where(above, 0.8, 0.2) * policy * (q - v[:, None]), 0).sum(axis=1)
    assert np.abs(pull[inner]).max() < 1e-9


@pytest.mark.parametrize(("tau", "score"), [(0.8, (6 / 7 + 3 * 5 / 6 + 3) / 7), (0.95, 1.0)])
def test_a_low_expectile_prefers_a_safe_detour(tau: float, score: float) -> None:
    """From c one move in four leads to the goal a; f and g lead there for sure, but bfga is one move longer than bca.

    With tau .8 V after "bc" is about (.2 * 1 + .15 * .5) / .35 = .79 of the best score, with .95 about .93; bfga scores
    6/7 = .86. From d, e and h, which lead to b, it is 5/6 in place of 1. c, f and g themselves lose nothing.
    """
    task = RandomWalks(adjacency=graph("bc bf fg ga ca cd ce ch db eb hb", nodes=8))
    assert guided_score(*ilql_fixed_point(task, tau, gamma=0.99), beta=100) == pytest.approx(score, abs=1e-3)
