"""The comparison with exact values: what is lost adds up, and estimates of advantages behave as theory says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from examples.diagnose import Learned, advantage_estimates, learned, losses, model_folder, picture
from examples.randomwalks.exact import END, States
from examples.randomwalks.task import TOKENS, RandomWalks, model_config, tokenizer
from tests.examples.test_randomwalks_task import graph


@pytest.fixture(scope="module")
def small() -> States:
    return States(RandomWalks(adjacency=graph("ba bc cb cd db", nodes=4)))


def test_what_is_lost_adds_up_to_the_difference_to_the_best(small: States) -> None:
    rng = np.random.default_rng(0)
    policy = rng.dirichlet(np.ones(len(TOKENS)), len(small.walks))
    score, best, lost = losses(small, policy)
    assert best == 1.0 and 0 < score < 0.1
    assert sum(sum(row.values()) for row in lost.values()) == pytest.approx(best - score)


def test_each_mistake_is_named(small: States) -> None:
    """From b to d by c rather than to a: a longer way. An end in b: an end before the goal. And so on."""
    best_q, _ = small.best()
    best = np.eye(len(TOKENS))[best_q.argmax(axis=1)]
    mistakes = {
        "b": (TOKENS.index("c"), "longer way"),
        "c": (END, "end before the goal"),
        "d": (TOKENS.index("a"), "edge that is not there"),
        "ba": (TOKENS.index("u"), "no end at the goal"),
    }
    for walk, (token, name) in mistakes.items():
        policy = best.copy()
        policy[small.number[walk]] = np.eye(len(TOKENS))[token]
        _, _, lost = losses(small, policy)
        assert {kind for row in lost.values() for kind, value in row.items() if value > 0} == {name}


def test_the_exact_values_are_the_best_baseline(small: States) -> None:
    policy = small.random_walk()
    _, v = small.of(policy)
    exact = advantage_estimates(small, Learned(policy, v))
    wrong = advantage_estimates(small, Learned(policy, -3 * v))
    assert exact["V' - V, learned V (lambda 0)"] == pytest.approx(1)
    assert exact["score - V, learned V (lambda 1)"] == pytest.approx(exact["score - V, exact V"])
    assert 0 < wrong["score - V, learned V (lambda 1)"] < exact["score alone"] < exact["score - V, exact V"] < 1
    assert wrong["V' - V, learned V (lambda 0)"] < 0.5


def test_a_model_is_asked_in_every_state(small: States, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint_20" / "hf_model"
    AutoModelForCausalLM.from_config(model_config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    assert model_folder(tmp_path / "run") == model_folder(folder) == folder
    found = learned(folder, small, beta=0.0)
    assert found.values is None and found.q is None
    np.testing.assert_allclose(found.policy.sum(axis=1), 1, rtol=1e-5)
    assert found.policy.min() > 0 and found.policy.max() < 0.2  # random weights


def test_the_picture_has_a_point_for_each_value() -> None:
    values, moves = np.array([0.0, 0.5, 1.0]), np.array([3, 2, 1])
    root = ElementTree.fromstring(picture([("V", values, values, moves), ("Q", values, values**2, moves)]))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 6
