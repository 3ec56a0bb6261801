"""Win rate over model size: the judge that errs in training, and a run of one step."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from examples.problems import Draw
from examples.randomwalks.task import RandomWalks
from examples.randomwalks.win_rates import NoisyJudge, win_rate


def test_the_judge_of_training_errs_on_a_fifth_of_the_pairs_whatever_their_order() -> None:
    task = RandomWalks(44)
    walks = sorted({walk for walk in task.samples if walk[0] == "c"})
    pairs = [(a[1:], b[1:]) for a, b in combinations(walks, 2) if len({*task.optimality([a, b])}) == 2]
    right = [int(task.optimality(["c" + b])[0] > task.optimality(["c" + a])[0]) for a, b in pairs]
    judge = NoisyJudge(task)
    said = judge.compare(["c"] * len(pairs), pairs)
    wrong = sum(answer != truth for answer, truth in zip(said, right, strict=True)) / len(pairs)
    assert len(pairs) >= 300 and 0.15 < wrong < 0.25  # a fifth, with a standard error of .02
    turned = judge.compare(["c"] * len(pairs), [(b, a) for a, b in pairs])
    assert all(one != other for one, other in zip(said, turned, strict=True))
    assert judge.compare(["c"], [(walks[0][1:], walks[0][1:])]) == [None]


@pytest.mark.slow
def test_a_run_of_one_step_is_about_as_good_as_its_start(here: Path) -> None:
    assert (
        0.3
        < win_rate(Draw(1, 44, here / "runs"), "small", walks=5, total_steps=1, batch_size=8, minibatch_size=None)
        < 0.7
    )
