"""The maze example: its rules by hand, its anchors, its data, its tokens, and the table that is ILQL's fixed point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.maze import tabular, task
from examples.maze.task import LIMIT, MOVES, Data, Maze, Walk, default_data, default_maze
from examples.play import Score, play, table

CORRIDOR = """
#####
#  G#
#####
"""
LEFT, RIGHT, UP, DOWN = (f"{move}\n" for move in MOVES)


def walk(maze: Maze, start: int, *said: str) -> Walk:
    episode = Walk(maze, start)
    for words in said:
        episode.say(words)
    return episode


def test_a_corridor_by_hand() -> None:
    maze = Maze(CORRIDOR)
    assert maze.cells == [(1, 1), (1, 2), (1, 3)] and maze.goal == 2
    assert maze.following.tolist() == [[0, 1, 0, 0], [0, 2, 1, 1], [1, 2, 2, 2]]
    assert maze.distance.tolist() == [2, 1, 0]
    assert maze.observations[0] == "The goal is at 1, 3. You are at 1, 1. Walls: to your left, above, below.\n"
    assert walk(maze, 0, RIGHT, RIGHT).rewards == [-1, 0]
    episode = walk(maze, 0, UP, "right, please", RIGHT, "right")
    assert (episode.rewards, episode.over) == ([-1, -1, -1, 0], True)
    assert episode.turns == [
        *(maze.observations[0], UP, maze.observations[0], "right, please", maze.observations[0], RIGHT),
        *(maze.observations[1], "right"),
    ]


def test_after_the_limit_it_is_too_late() -> None:
    maze = Maze(CORRIDOR)
    assert walk(maze, 1, *[LEFT] * (LIMIT - 2), RIGHT, RIGHT).score == -(LIMIT - 1)
    episode = walk(maze, 1, *[LEFT] * (LIMIT - 1), RIGHT)
    assert not episode.over
    episode.say(RIGHT)
    assert (episode.over, episode.score) == (True, -(LIMIT + 1))


def test_the_anchors_of_the_benchmark() -> None:
    """-6.84 is the paper's maximum, -101 its minimum. A uniform policy was measured at -85.6 in its code by playing."""
    maze = default_maze()
    assert len(maze.starts) == 25
    assert maze.expected_score(maze.policy(1.0)) == pytest.approx(-6.84, abs=1e-9)
    uniform = maze.expected_score(maze.policy(0.0))
    assert uniform == pytest.approx(-85.89, abs=0.005)
    # Without the move that comes too late it would be -85.14: the limit is where the exact number depends on the rules.
    stuck = np.tile(np.eye(4)[0], (len(maze.cells), 1))  # always left
    assert min(maze.expected_scores(stuck)[maze.starts]) == -101


def test_played_scores_are_the_expected_ones() -> None:
    maze = default_maze()
    data = task.wander(maze, episodes=200, skill=0.5, seed=3)
    score = Score.of(episode.score for episode in data.walks)
    assert abs(score.mean - maze.expected_score(maze.policy(0.5))) < 3 * score.error


def test_a_policy_of_texts_plays_shortest_paths() -> None:
    maze = default_maze()
    best = {maze.observations[cell]: f"{list(MOVES)[maze.policy(1.0)[cell].argmax()]}\n" for cell in maze.starts}

    def respond(texts: list[str]) -> list[str]:
        return [best[text.splitlines(keepends=True)[-1]] for text in texts]

    scores = play(respond, [Walk(maze, cell) for cell in maze.starts])
    assert scores == [1 - maze.distance[cell] for cell in maze.starts]
    assert np.mean(scores) == pytest.approx(-6.84)


def test_the_data() -> None:
    data, maze = default_data(), default_maze()
    assert task.samples() is data.samples
    assert [len(rewards) for rewards in task.rewards()] == [len(rewards) for rewards in data.rewards]
    assert sum(task.rewards()[0]) * task.REWARD_UNIT == pytest.approx(sum(data.rewards[0]))
    assert len(data.samples) == task.EPISODES
    assert all(len(turns) == 2 * len(rewards) for turns, rewards in zip(data.samples, data.rewards, strict=True))
    assert 33_000 < sum(map(len, data.rewards)) < 36_000
    score = Score.of(sum(rewards) for rewards in data.rewards)
    assert abs(score.mean - maze.expected_score(maze.policy(task.SKILL))) < 3 * score.error
    assert {turns[0] for turns in data.samples} == set(task.eval_prompts())
    assert task.wander(maze, 5, seed=2).samples == task.wander(maze, 5, seed=2).samples


def test_the_metric_counts_first_moves_of_shortest_paths() -> None:
    prompts = task.eval_prompts()[:3]  # row 1, columns 1 to 3: right, right, down
    assert task.metric_fn(prompts=prompts, outputs=[RIGHT, LEFT, "down"])["shortest"] == [1, 0, 1]
    assert task.metric_fn(prompts=prompts, outputs=["", "the goal", DOWN])["shortest"] == [0, 0, 1]


def test_a_line_is_a_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    longest = max(task.samples(), key=len)
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer.encode("".join(longest))
        assert len(ids) == len(longest) == 2 * (LIMIT + 1)
        assert tokenizer.decode(ids) == "".join(longest)
        assert tokenizer.encode("to the left, please\n" + longest[0]) == [tokenizer.unk_token_id, ids[0]]
        assert len(tokenizer) == 4 + 25 + 4
    config = task.model_config()
    assert config.vocab_size == len(task.tokenizer()) and config.max_position_embeddings > len(longest)


def test_the_fixed_point_of_a_corridor_by_hand() -> None:
    """gamma 1/2, tau 1/2, so V is the mean of Q over the moves that were taken.

    Cell 1: Q(right) = 0, Q(left) = -1 + V0 / 2, each once. Cell 0: Q(right) = -1 + V1 / 2, Q(up) = -1 + V0 / 2.
    V1 = (-1 + V0 / 2) / 2 and V0 = -1 + (V1 + V0) / 4: V0 = -18/11, V1 = -10/11.
    """
    maze = Maze(CORRIDOR)
    data = Data([walk(maze, 1, LEFT, UP, RIGHT, RIGHT)])
    solved = tabular.solve(maze, data, gamma=0.5, tau=0.5)
    assert solved.counts.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(solved.values, [-18 / 11, -10 / 11, 0])
    np.testing.assert_allclose(solved.q[1], [-20 / 11, 0, np.nan, np.nan])
    policy = solved.policy(beta=np.log(2) * 11 / 20)  # the Qs of cell 1 are 20/11 apart: twice as likely
    np.testing.assert_allclose(policy[1], [1 / 3, 2 / 3, 0, 0])
    np.testing.assert_allclose(solved.policy(0)[0], [0, 1 / 2, 1 / 2, 0])


def test_the_fixed_point_of_the_data_finds_shortest_paths() -> None:
    maze = default_maze()
    solved = tabular.solve(maze, default_data(), gamma=0.99, tau=0.9)
    assert maze.expected_score(solved.policy(0)) == pytest.approx(-52, abs=2)  # imitation
    assert maze.expected_score(solved.policy(16)) == pytest.approx(-6.84, abs=0.01)
    q, v = solved.q, solved.values
    seen = solved.counts > 0
    pull = np.where(seen & (q > v[:, None]), 0.9, 0.1) * np.where(seen, solved.counts * (q - v[:, None]), 0)
    np.testing.assert_allclose(pull.sum(axis=1), 0, atol=1e-6)


def test_tables_are_aligned() -> None:
    assert table(["policy", "score"], [["random", "-85.9"], ["BC", "-7"]]).splitlines() == [
        "policy  score",
        "random  -85.9",
        "BC         -7",
    ]


def test_the_data_needs_no_torch() -> None:
    code = "import sys; from examples.maze import task; task.samples(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
