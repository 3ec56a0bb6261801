"""Compare behaviour cloning and ILQL on the maze with lower and upper bounds.

    python examples/maze [--seed 1] [--seeds 3] [--directory runs/maze]

The configuration is configs/ilql_maze.yml; cloning is SFT with the same model, data, steps and optimizer. Policies play
from each start `PLAYS` times, sampling at temperature 1. The scores of random moves, of the policy that made the data,
of the table (`tabular.py`) and of shortest paths are exact.

On seeds 1, 2 and 3 ILQL scores -7.45, -6.88 and -7.42 at beta 80 (standard errors .3 to .6), and -50 to -52 at beta 0.
Cloning scores -55.5, -48.4 and -56.1, the table and shortest paths -6.84. Training takes 46 to 60 CPU seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import trlx_like
from examples import configurations
from examples.maze import tabular
from examples.maze.task import REWARD_UNIT, SKILL, Walk, default_data, default_maze, rewards
from examples.play import Episode, Result, cloning, main, play_trained

BETA = 80  # for rewards in units of ten moves
PLAYS = 4


def episodes() -> list[Episode]:
    """Make one episode from each start, `PLAYS` times."""
    maze = default_maze()
    return [Walk(maze, cell) for cell in maze.starts for _ in range(PLAYS)]


def run(seed: int, directory: Path) -> list[Result]:
    """Run behaviour cloning and ILQL under one seed."""
    config = configurations.load("ilql_maze")
    data = default_data()
    results = []
    guided = {f"ILQL, beta {beta}": {"beta": beta} for beta in (0, BETA)}
    for name, options, given, ways in (("bc", cloning(config), None, {"BC": {}}), ("ilql", config, rewards(), guided)):
        changes = {"seed": seed, "checkpoint_dir": str(directory / name), "resume_from_checkpoint": None}
        results += play_trained(options.evolve(train=changes), data.samples, given, episodes, ways)
    return results


def bounds() -> dict[str, float]:
    """Return the exact scores of policies that need no network, by name."""
    maze, method = default_maze(), configurations.load("ilql_maze").method
    assert isinstance(method, trlx_like.ILQLConfig)
    table = tabular.solve(maze, default_data(), method.gamma, method.tau)
    return {
        "random moves": maze.expected_score(maze.policy(0)),
        "data": maze.expected_score(maze.policy(SKILL)),
        f"tabular ILQL, beta {BETA}": maze.expected_score(table.policy(BETA / REWARD_UNIT)),
        "shortest paths": maze.expected_score(maze.policy(1)),
    }


if __name__ == "__main__":
    main(__doc__, run, bounds, Path("runs/maze"))
