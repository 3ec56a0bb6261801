"""The result of ILQL on the maze's data if Q and V are tables, without generalisation: its exact fixed point.

States do not count moves, so the limit of 100 moves is ignored: in the table, an episode that was cut off continues
like another episode that passed the same cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.maze.task import LIMIT, MOVES, Data, Floats, Maze
from examples.values import expectiles


@dataclass
class Table:
    """Hold for each cell and move how often it was taken and its Q, and for each cell V."""

    counts: Floats  # [N, 4]
    q: Floats  # [N, 4], NaN where no episode took the move
    values: Floats  # [N]

    def policy(self, beta: float) -> Floats:
        """Return softmax(log pi_data + beta (Q - V)) [N, 4], uniform in cells that no episode visited."""
        taken = self.counts > 0
        scores = np.log(np.where(taken, self.counts, 1)) + beta * (np.where(taken, self.q, 0) - self.values[:, None])
        scores = np.where(taken, scores, -np.inf)
        scores[~taken.any(axis=1)] = 0
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        policy: Floats = weights / weights.sum(axis=1, keepdims=True)
        return policy


def solve(maze: Maze, data: Data, gamma: float, tau: float) -> Table:
    """Iterate Q(s, a) = r + gamma V(s') and V(s) = tau-expectile of Q(s, a) over the moves taken in s, to convergence.

    The maze is deterministic, so r + gamma V(s') is the same in all episodes that take a move in a cell.
    """
    counts = np.zeros((len(maze.cells), len(MOVES)))
    for walk in data.walks:
        for cell, move in transitions(maze, walk.turns):
            counts[cell, move] += 1
    values = np.zeros(len(maze.cells))
    while True:
        q = maze.rewards() + gamma * np.where(maze.following == maze.goal, 0.0, values[maze.following])
        new = expectiles(q, counts, tau)
        if np.abs(new - values).max() < 1e-10:
            return Table(counts, np.where(counts > 0, q, np.nan), new)
        values = new


def transitions(maze: Maze, turns: list[str]) -> list[tuple[int, int]]:
    """Return (cell, move) of each turn that moved; the move after the limit does not count."""
    cells = [maze.observations.index(text) for text in turns[::2]]
    moves = [list(MOVES).index(text.strip()) for text in turns[1::2]]
    return list(zip(cells, moves, strict=True))[:LIMIT]
