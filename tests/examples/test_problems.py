"""Problems are drawn with the seeds of the examples, unless one is fixed."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from examples.bradley_terry import STRENGTHS, share_in_order
from examples.maze.task import Maze
from examples.problems import Draw, add_options, draws, openings, summary
from examples.wordle.task import Wordle

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEEDED = [file for file in sorted(EXAMPLES.rglob("*.py")) if "add_options(parser, " in file.read_text("utf-8")]


def runs(*words: str) -> list[Draw]:
    parser = argparse.ArgumentParser()
    add_options(parser, 1000, Path("runs"), "graph")
    return draws(parser.parse_args(words))


def test_each_seed_draws_its_own_problem() -> None:
    assert runs("--seeds", "2") == [Draw(1000, 1000, Path("runs/seed1000")), Draw(1001, 1001, Path("runs/seed1001"))]


def test_one_run_has_the_folder_itself() -> None:
    assert runs("--seed", "3") == [Draw(3, 3, Path("runs"))]


def test_a_problem_can_be_fixed() -> None:
    assert [run.problem for run in runs("--seeds", "2", "--problem", "44")] == [44, 44]


def test_the_summary_says_of_how_many_problems_it_is() -> None:
    assert summary(runs("--seeds", "3"), [0.9, 0.5, 0.7]) == "median 0.700, worst 0.500 of 3 problems, 3 seeds"
    fixed = runs("--seeds", "2", "--problem", "44")
    assert summary(fixed, [-1.0, -2.0], 2) == "median -1.50, worst -2.00 of 1 problem, 2 seeds"


def test_the_worst_is_the_largest_where_less_is_better() -> None:
    assert summary(runs("--seeds", "2"), [3.0, 5.0], 0, max) == "median 4, worst 5 of 2 problems, 2 seeds"


@pytest.mark.parametrize("program", SEEDED, ids=lambda file: file.stem)
def test_a_program_with_seeds_ends_with_the_summary(program: Path) -> None:
    """`examples.play` and `examples.randomwalks.seeds` are the programs of several examples."""
    text = program.read_text(encoding="utf-8")
    assert "draws(" in text and "summary(" in text


def test_the_share_of_words_in_order() -> None:
    """Of 21 pairs one is wrong if two neighbours change places, and all are if the order is reversed."""
    rewards = dict(STRENGTHS)
    assert share_in_order(rewards) == 1
    rewards["fig"], rewards["orange"] = rewards["orange"], rewards["fig"]
    assert share_in_order(rewards) == 20 / 21
    assert share_in_order({word: -value for word, value in STRENGTHS.items()}) == 0


def test_openings_are_split_again_and_never_shared() -> None:
    first, again, second = openings(1), openings(1), openings(2)
    assert first == again != second
    for training, held_out in (openings(0), first, second):
        assert (len(training), len(held_out)) == (64, 16) and not set(training) & set(held_out)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_drawn_maze_has_one_way_to_the_goal_from_every_cell(number: int) -> None:
    """29 cells joined by 28 openings, without a loop: each is 56 moves that lead elsewhere."""
    maze = Maze.drawn(number)
    assert len(maze.cells) == 29 and maze.distance[maze.starts].max() < len(maze.cells)
    assert (maze.following != np.arange(29)[:, None]).sum() == 56
    assert len(set(maze.observations)) == 29
    assert maze.observations == Maze.drawn(number).observations != Maze.drawn(number + 1).observations


def test_problem_0_is_the_task_of_the_benchmark() -> None:
    assert Maze.drawn(0).expected_score(Maze.drawn(0).policy(1.0)) == pytest.approx(-6.84)
    assert len(Wordle.drawn(0).words) == 431


def test_drawn_words_are_of_the_list_and_have_their_own_clues() -> None:
    drawn = Wordle.drawn(5)
    assert len(drawn.words) == len(set(drawn.words)) == 330 and set(drawn.words) < set(Wordle.drawn(0).words)
    assert (
        drawn.clue_line(drawn.number[drawn.words[3]], 3)
        == " ".join(f"{letter}{place}!" for place, letter in enumerate(drawn.words[3], 1)) + "\n"
    )
