"""Compare behaviour cloning and ILQL on the maze with lower and upper bounds.

    python examples/maze [--seed 1] [--seeds 3] [--problem 0] [--directory runs/maze]

The configuration is configs/ilql_maze.yml; cloning is SFT with the same model, data, steps and optimizer. Policies play
from each start `PLAYS` times, sampling at temperature 1. The scores of random moves, of the policy that made the data,
of the table (`tabular.py`) and of shortest paths are exact.

Problem 0 is the maze of LMRL-Gym; others are drawn. On problem 0 with seeds 1, 2 and 3 ILQL scores -6.84, -6.84 and
-6.85 at beta 80 (standard errors .3), and -49 to -54 at beta 0. Cloning scores -56.1, -52.4 and -48.3, the table and
shortest paths -6.84. Training takes 40 to 45 CPU seconds.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples import configurations
from examples.maze import tabular
from examples.maze.task import (
    REWARD_UNIT,
    SKILL,
    Maze,
    Walk,
    eval_prompts,
    metric_fn,
    model_config,
    scaled_rewards,
    tokenizer,
    wander,
)
from examples.play import Episode, Result, cloning, game_parser, main, play_trained
from examples.problems import Draw

BETA = 80  # for rewards in units of ten moves
PLAYS = 4


def episodes(maze: Maze) -> list[Episode]:
    """Make one episode from each start, `PLAYS` times."""
    return [Walk(maze, cell) for cell in maze.starts for _ in range(PLAYS)]


def run(draw: Draw) -> list[Result]:
    """Run behaviour cloning and ILQL on one maze."""
    config = configurations.load("ilql_maze")
    maze = Maze.drawn(draw.problem)
    data = wander(maze)
    parts = {"model_path": model_config(maze), "tokenizer": tokenizer(maze)}
    watched = {"eval_prompts": eval_prompts(maze), "metric_fn": partial(metric_fn, maze=maze)}
    results = []
    guided = {f"ILQL, beta {beta}": {"beta": beta} for beta in (0, BETA)}
    for name, options, given, ways in (
        ("bc", cloning(config), None, {"BC": {}}),
        ("ilql", config, scaled_rewards(data), guided),
    ):
        changes = {"seed": draw.seed, "checkpoint_dir": str(draw.directory / name), "resume_from_checkpoint": None}
        games = partial(episodes, maze)
        results += play_trained(options.evolve(train=changes), data.samples, given, games, ways, **parts, **watched)
    return results


def bounds(problem: int) -> dict[str, float]:
    """Return the exact scores of policies that need no network, by name."""
    maze, method = Maze.drawn(problem), configurations.load("ilql_maze").method
    assert isinstance(method, trlx_like.ILQLConfig)
    table = tabular.solve(maze, wander(maze), method.gamma, method.tau)
    return {
        "random moves": maze.expected_score(maze.policy(0)),
        "data": maze.expected_score(maze.policy(SKILL)),
        f"tabular ILQL, beta {BETA}": maze.expected_score(table.policy(BETA / REWARD_UNIT)),
        "shortest paths": maze.expected_score(maze.policy(1)),
    }


if __name__ == "__main__":
    main(game_parser(__doc__, Path("runs/maze"), "maze").parse_args(), run, bounds)
