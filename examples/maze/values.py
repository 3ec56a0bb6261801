"""Say in which cells a run of ILQL on a maze loses its score, and compare its Q there with that of the table.

The model plays from each start `PLAYS` times, sampling at temperature 1. A move costs a point for each step that it
adds to the shortest way. Over an episode that arrives, these costs add up to what its score misses to the shortest path
from its start. Q is read at each turn that is played, so the model may be one that reads earlier turns. The table is
that of `tabular.py`: the fixed point of the same losses on the same data. Q is in units of moves, and a gap is that of
the best move to the next best.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import trlx_like
from examples import configurations
from examples.maze import tabular
from examples.maze.__main__ import BETA, episodes
from examples.maze.task import MOVES, REWARD_UNIT, Floats, Maze, tokenizer, wander
from examples.play import Score, play, table
from examples.values import Panel, Reader, model_folder


def added_steps(maze: Maze) -> Floats:
    """Return by how many steps each move is longer than a shortest path [N, 4], 0 for the best moves."""
    ahead = maze.distance[maze.following]
    longer: Floats = (1 + ahead - maze.distance[:, None]).astype(float)
    return longer


def played(folder: Path, maze: Maze, beta: float) -> tuple[Score, list[tuple[int, int, Floats]]]:
    """Play an exported model; return its score, and the cell, the move and the Q [4], in moves, of each turn."""
    read = Reader(folder, tokenizer(maze))
    turns: list[tuple[int, int, Floats]] = []

    def respond(texts: list[str]) -> list[str]:
        guided, _, q = read(texts, beta)
        logits = guided[:, : len(MOVES)]
        moves = torch.multinomial(logits.softmax(dim=-1), 1)[:, 0].tolist()
        cells = [maze.observations.index(text.splitlines(keepends=True)[-1]) for text in texts]
        turns.extend(zip(cells, moves, REWARD_UNIT * q[:, : len(MOVES)].double().numpy(), strict=True))
        return [f"{list(MOVES)[move]}\n" for move in moves]

    return Score.of(play(respond, episodes(maze))), turns


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this game."""
    parser.add_argument("--problem", type=int, default=0, help="number of the maze")
    parser.add_argument("--beta", type=float, default=BETA, help="weight of the advantage in decoding")


def diagnose(given: argparse.Namespace) -> list[Panel]:
    """Print what a run loses in which cells, and return its Q and that of the table for the picture."""
    torch.manual_seed(given.problem)
    maze, method = Maze.drawn(given.problem), configurations.load("ilql_maze").method
    assert isinstance(method, trlx_like.ILQLConfig)
    exact, longer = tabular.solve(maze, wander(maze), method.gamma, method.tau), added_steps(maze)
    score, turns = played(model_folder(given.run), maze, given.beta)
    rows, errors, found = [], [], {}
    for cell in maze.starts:
        here = [(move, q) for at, move, q in turns if at == cell]
        best = longer[cell] == 0
        found[cell] = q = np.mean([q for _, q in here], axis=0)
        errors.append(float(np.nanmean(np.abs(q - exact.q[cell]))))
        wrong = sum(not best[move] for move, _ in here) / len(here)
        largest = sum(not best[q.argmax()] for _, q in here) / len(here)
        cost = sum(longer[cell, move] for move, _ in here) / score.episodes
        gaps = [f"{q[best].max() - q[~best].max():.2f}" for q in (exact.q[cell], q)]
        taken = f"{exact.counts[cell][best].sum():.0f} of {exact.counts[cell].sum():.0f}"
        numbers = [f"{value:.2f}" for value in (cost, wrong, largest)]
        rows.append([str(cell), str(maze.distance[cell]), str(len(here)), *numbers, taken, *gaps])
    rows.sort(key=lambda row: -float(row[3]))
    print(f"score {score.mean:.2f}, shortest paths {maze.expected_score(maze.policy(1)):.2f}")
    print(f"mean error of Q against the table, over cells and moves: {np.mean(errors):.2f} moves\n")
    shares = ["points lost", "wrong moves", "Q wrong"]
    head = ["cell", "to goal", "turns", *shares, "best in data", "exact gap", "learned gap"]
    print(table(head, rows))
    pairs = [(cell, move) for cell in found for move in np.flatnonzero(exact.counts[cell])]  # moves of the data
    learned = np.array([found[cell][move] for cell, move in pairs])
    at = tuple(np.array(pairs).T)
    return [Panel("Q of the moves in the data", exact.q[at], learned, maze.distance[at[0]], "{} moves")]
