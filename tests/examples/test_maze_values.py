"""Where a run on a maze loses its score: what a wrong move costs, and the Q that is read while a model plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.maze.task import MOVES, Maze, default_maze, model_config, tokenizer
from examples.maze.values import added_steps, played
from tests.examples.test_maze import CORRIDOR, LEFT, RIGHT, UP, walk
from trlx_like import AutoModelForCausalLMWithILQLHeads


def test_the_steps_that_moves_add_are_what_an_episode_misses() -> None:
    """The cells of the corridor are 2, 1 and 0 moves from the goal. Left from cell 1 adds 1 + 2 - 1 = 2, a wall 1."""
    maze = Maze(CORRIDOR)
    longer = added_steps(maze)
    assert longer[:2].tolist() == [[1, 0, 1, 1], [2, 0, 1, 1]]
    assert walk(maze, 1, LEFT, UP, RIGHT, RIGHT).score == walk(maze, 1, RIGHT).score - (2 + 1)


def test_a_model_that_only_goes_right_takes_the_shortest_path(tmp_path: Path) -> None:
    maze = Maze(CORRIDOR)
    tokens = tokenizer(maze)
    model = AutoModelForCausalLMWithILQLHeads(AutoModelForCausalLM.from_config(model_config(maze)))
    with torch.no_grad():
        for head in model.ilql_heads.targets:
            target: Any = head
            last = target.layers[2]
            last.weight.zero_()
            last.bias.zero_()[tokens.convert_tokens_to_ids(RIGHT)] = 1
    model.save_pretrained(tmp_path)
    score, turns = played(tmp_path, maze, beta=1000)
    assert score.mean == -0.5  # -1 and 0 from the two starts
    assert sorted((cell, move) for cell, move, _ in turns) == [(0, 1)] * 4 + [(1, 1)] * 8
    assert all(q.tolist() == [10 * (move == "right") for move in MOVES] for _, _, q in turns)


def test_the_model_reads_the_present_observation_alone() -> None:
    config = model_config(default_maze())
    for window, same in ((config.sliding_window, True), (None, False)):
        config.sliding_window = window
        lm = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            one, other = lm(input_ids=torch.tensor([[5, 0, 9], [7, 3, 9]])).logits[:, -1]
        assert torch.allclose(one, other) == same
