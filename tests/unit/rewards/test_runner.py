"""The reward runner under faults: in this process, and in workers that hang, crash and are killed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFont

from tests.unit.rewards import faulty
from tests.unit.rewards.support import GIVEN, MANY, RIGHT, Runners, faults, score, scores_of
from trlx_like.errors import RewardError
from trlx_like.rewards.weighted import WeightedRewards

# name, options that it needs, what a batch of three gets under on_error: abstain, and the kind of the fault
IN_PROCESS: list[tuple[str, dict[str, Any], list[float | None], str]] = [
    ("raises", {}, [None, None, None], "raised"),
    ("wrong_length", {}, [None, None, None], "wrong length"),
    ("wrong_type", {}, [1.0, None, 3.0], "wrong type"),
    ("nan", {}, [1.0, None, 3.0], "not finite"),
    ("inf", {}, [1.0, None, 3.0], "not finite"),
    ("none", {}, [None, None, None], "wrong type"),
    ("hangs", {"time_limit": 0.2}, [None, None, None], "time limit"),
    ("stuck", {"time_limit": 0.2}, [None, None, None], "time limit"),
    ("one_by_one", {}, [1.0, None, 3.0], "raised"),
]
KILLED: list[tuple[str, dict[str, Any], list[float | None], str]] = [
    ("hangs_for_good", {"time_limit": 0.2}, [None, None, None], "time limit"),
    ("exits", {}, [None, None, None], "died"),
    ("hogs", {"worker_memory": 200}, [None, None, None], "memory limit"),
]
CASES = [(0, *case) for case in IN_PROCESS] + [(1, *case) for case in (*IN_PROCESS, *KILLED)]
faulty_functions = pytest.mark.parametrize(
    ("workers", "name", "options", "rewards", "kind"), CASES, ids=[f"{case[1]}-{case[0]}" for case in CASES]
)


@faulty_functions
def test_a_fault_is_its_samples_abstention(
    workers: int,
    name: str,
    options: dict[str, Any],
    rewards: list[float | None],
    kind: str,
    runner: Runners,
    tmp_path: Path,
) -> None:
    """It is on record with its samples, and the next batch is scored as if nothing had been."""
    own = runner(getattr(faulty, name), workers=workers, on_error="abstain", **options)
    given = {**GIVEN, "samples": ["x"] * 3}
    scores = score(own, given, [{"goal": row} for row in range(3)], step=7)
    assert (scores.rewards, scores.faults) == (rewards, 1)
    (line,) = faults(tmp_path)
    lost = [row for row, reward in enumerate(rewards) if reward is None]
    assert (line["step"], line["rank"], line["function"], line["kind"]) == (7, 3, name, kind)
    assert line["outputs"] == [GIVEN["outputs"][row] for row in lost] and line["prompts"] == ["p"] * len(lost)
    assert line["metadata"] == [{"goal": row} for row in lost] and line["count"] == len(lost)
    assert (f"in {name}\n" in line["traceback"]) == (name in ("raises", "hangs", "stuck"))
    good = {column: [values[0]] for column, values in GIVEN.items()}
    assert scores_of(own, good).rewards == [1.0]


@pytest.mark.parametrize(("name", "options", "kind"), [(case[0], case[1], case[3]) for case in (*IN_PROCESS, *KILLED)])
def test_a_fault_ends_the_run_by_default(
    name: str, options: dict[str, Any], kind: str, runner: Runners, tmp_path: Path
) -> None:
    workers = int(name in ("raises", *(case[0] for case in KILLED)))
    own = runner(getattr(faulty, name), workers=workers, **options)
    with pytest.raises(RewardError) as error:
        scores_of(own)
    first, *shown = str(error.value).splitlines()
    assert first.startswith(name) and first.startswith(faults(tmp_path)[0]["message"])
    assert name == "none" or any("output: " in line for line in shown)
    assert [line["kind"] for line in faults(tmp_path)] == [kind]


def test_a_fault_may_have_a_value(runner: Runners) -> None:
    own = runner(faulty.nan, on_error="value", error_value=-2.5)
    assert scores_of(own).rewards == [1.0, -2.5, 3.0]
    own = runner(WeightedRewards([faulty.raises, faulty.length], [2, 1]), on_error="value", error_value=-2.5)
    assert scores_of(own).rewards == [-4.0, -2.0, -2.0]  # 2 x -2.5 and the length


def test_abstaining_is_no_fault(runner: Runners, tmp_path: Path) -> None:
    scores = scores_of(runner(lambda outputs: [None, 1, None]))
    assert (scores.rewards, scores.faults, faults(tmp_path)) == ([None, 1.0, None], 0, [])


def test_groups_stay_together(runner: Runners) -> None:
    seen: list[list[str]] = []

    class Pairs:
        group_size = 2

        def __call__(self, outputs: list[str]) -> list[float]:
            seen.append(outputs)
            return [0.0] * len(outputs)

    scores_of(runner(Pairs(), sample_time_limit=60), MANY)
    assert seen == [["a", "bad"], ["ccc", "a"], ["bad", "ccc"]]


# In this process.


def test_an_interrupt_passes_and_an_exit_does_not(runner: Runners) -> None:
    def interrupted(**_: Any) -> Any:
        raise KeyboardInterrupt

    def leaves(**_: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(KeyboardInterrupt):
        scores_of(runner(interrupted))
    with pytest.raises(RewardError, match="leaves raised SystemExit: 3"):
        scores_of(runner(leaves))


def test_it_sees_copies(runner: Runners) -> None:
    """Also of what is within what came with a prompt."""
    given = {name: list(column) for name, column in GIVEN.items()}
    metadata: list[dict[str, Any]] = [{"goals": {"name": "x"}} for _ in range(3)]
    for workers in (0, 1):
        assert score(runner(faulty.mutates, workers=workers), given, metadata).rewards == RIGHT
    assert given == GIVEN and metadata == [{"goals": {"name": "x"}}] * 3


class Derived(Image.Image):
    """An image of a class outside PIL, as cameras' and datasets' libraries have them."""


def test_what_comes_with_a_prompt_may_be_anything(runner: Runners, tmp_path: Path) -> None:
    """Images are copied, whoever derived them, and said in words; fonts and number formats are neither."""
    seen: list[Any] = []

    def looks(outputs: list[str], things: list[Any]) -> list[float]:
        seen.extend(things[0])
        raise ValueError("no")

    picture = Image.new("RGB", (4, 5))
    picture.__class__ = Derived
    things = [picture, ImageFont.load_default(), torch.float32, torch.zeros(2, 3)]
    assert score(runner(looks, on_error="abstain"), GIVEN, [{"things": things}] * 3).rewards == [None] * 3
    assert seen[0] is not picture and seen[1:3] == things[1:3]
    assert "an image of 4 x 5 pixels" in str(faults(tmp_path)[0]["metadata"][0]["things"])
    assert "torch.float32" in str(faults(tmp_path)[0]["metadata"][0]["things"])


# Async functions.


@pytest.mark.parametrize("workers", [0, 2])
def test_async_functions_are_awaited_together(workers: int, runner: Runners, tmp_path: Path) -> None:
    own = runner(WeightedRewards([faulty.patient, faulty.length, faulty.patient_too]), workers=workers)
    log = tmp_path / "log"
    scores = score(own, GIVEN, [{"log": str(log)}] * 3)
    assert scores.rewards == RIGHT and list(scores.components) == ["patient", "length", "patient_too"]
    first, second, *_ = log.read_text().splitlines()
    assert {first, second} == {"patient begins", "patient too begins"}  # neither has ended before the other begins


@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_function_that_blocks_the_others(workers: int, runner: Runners, tmp_path: Path) -> None:
    own = runner(WeightedRewards([faulty.blocks, faulty.length]), workers=workers, on_error="abstain", time_limit=0.2)
    assert scores_of(own).components == {"blocks": [None] * 3, "length": RIGHT}
    assert [line["kind"] for line in faults(tmp_path)] == ["time limit"]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_function_that_exits(workers: int, runner: Runners, tmp_path: Path) -> None:
    own = runner(WeightedRewards([faulty.leaves, faulty.length]), workers=workers, on_error="abstain")
    assert scores_of(own).components == {"leaves": [None] * 3, "length": RIGHT}
    assert faults(tmp_path)[0]["message"] == "leaves raised SystemExit: 3"


def test_async_within_a_running_loop(runner: Runners) -> None:
    """As in a notebook."""

    async def cell() -> list[Any]:
        return scores_of(runner(faulty.stuck), {name: ["x"] for name in GIVEN}).rewards

    assert asyncio.run(cell()) == [1.0]


# Other than text, and what is scored once.


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_need_not_be_text(workers: int, runner: Runners, tmp_path: Path) -> None:
    own = runner(faulty.brightness, workers=workers, on_error="abstain")
    images = [[[0.0, 1.0]], [[0.5, math.nan]]]
    assert score(own, {"images": images, "prompts": ["x", "y"]}, [{}, {}]).rewards == [0.5, None]
    (line,) = faults(tmp_path)
    assert line["prompts"] == ["y"] and line["images"] == "[[[0.5, nan]]]"


def test_another_answer_each_time_is_asked_for_once(runner: Runners) -> None:
    own = runner(faulty.counts, workers=1)
    first, second = own.submit(GIVEN, [{}] * 3), own.submit(GIVEN, [{}] * 3)
    assert own.result(second).rewards == [4.0, 5.0, 6.0]  # whatever the order in which results are asked for
    assert own.result(first).rewards == [1.0, 2.0, 3.0]


def test_a_record_holds_whatever_came_with_a_prompt(runner: Runners, tmp_path: Path) -> None:
    metadata: list[dict[str, Any]] = [{"goal": {(1, 2): math.inf}, "path": tmp_path}, {"goal": {1: [2]}}, {}]
    score(runner(faulty.raises, on_error="abstain"), GIVEN, metadata)
    assert faults(tmp_path)[0]["metadata"] == repr(metadata)
    score(runner(faulty.raises, on_error="abstain"), GIVEN, [{"path": tmp_path}, {"goal": {1: [2]}}, {}])
    assert faults(tmp_path)[1]["metadata"] == [{"path": repr(tmp_path)}, {"goal": {"1": [2]}}, {}]


def test_nothing_to_score(runner: Runners) -> None:
    for workers in (0, 1):
        for function in (faulty.raises, WeightedRewards([faulty.raises, faulty.length])):
            assert score(runner(function, workers=workers), {}, []).rewards == []
