"""The comparison with exact values: what is lost adds up, and estimates of advantages behave as theory says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from examples.diagnose import GAMES, main
from examples.maze import task as maze_task
from examples.randomwalks.exact import END, States
from examples.randomwalks.task import TOKENS, RandomWalks, model_config, tokenizer
from examples.randomwalks.values import Learned, advantage_estimates, learned, losses
from examples.values import Panel, expectiles, model_folder, picture
from examples.wordle import task as wordle_task
from tests.examples.test_maze import CORRIDOR
from tests.examples.test_randomwalks_task import graph
from trlx_like import AutoModelForCausalLMWithILQLHeads


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
    panels = [Panel("V", values, values, moves, "{} moves"), Panel("Q", values, values**2, moves, "{} moves")]
    root = ElementTree.fromstring(picture(panels))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 6
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in words if word and word.endswith("moves")] == ["1 moves", "2 moves", "3 moves"]


def test_expectiles_by_hand() -> None:
    # Of 0 and 3 with tau 2/3: 2/3 (3 - v) = 1/3 v, v = 2. Weights 2 and 1: 2/3 (3 - v) = 2/3 v, v = 3/2.
    # At 1/2 it is the mean.
    x = np.array([[0.0, 3.0], [0.0, 3.0], [5.0, 3.0], [1.0, 2.0]])
    weights = [[1, 1], [2, 1], [0, 4], [0, 0]]
    np.testing.assert_allclose(expectiles(x, weights, 2 / 3), [2, 1.5, 3, 0])
    np.testing.assert_allclose(expectiles(x, weights, 1 / 2), [1.5, 1, 3, 0])


@pytest.mark.parametrize("game", GAMES)
def test_each_game_is_diagnosed_with_a_picture(
    game: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walks, maze = RandomWalks(adjacency=graph("ba bc cb cd db", nodes=4)), maze_task.Maze(CORRIDOR)
    monkeypatch.setattr("examples.randomwalks.values.RandomWalks", lambda number: walks)
    monkeypatch.setattr(maze_task.Maze, "drawn", lambda number: maze)
    models: dict[str, Callable[[], Any]] = {
        "randomwalks": lambda: AutoModelForCausalLM.from_config(model_config()),
        "maze": lambda: AutoModelForCausalLM.from_config(maze_task.model_config(maze)),
        "wordle": wordle_task.model,
    }
    AutoModelForCausalLMWithILQLHeads(models[game]()).save_pretrained(tmp_path / "model")
    words = ["--words", "6"] if game == "wordle" else []
    file = tmp_path / "pictures" / "values.svg"
    monkeypatch.setattr(
        "sys.argv", ["diagnose", game, str(tmp_path / "model"), "--problem", "1", *words, "--picture", str(file)]
    )
    main()
    said = capsys.readouterr().out
    assert "score" in said and "exact" in said
    assert ElementTree.parse(file).find(".//{http://www.w3.org/2000/svg}circle") is not None
