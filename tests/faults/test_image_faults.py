"""Runs of DDPO on reward functions that fail: the same runner as for text, with the same faults."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.images import PROMPTS
from tests.contract.recipes import few
from tests.contract.runs import assert_same, assert_same_run, rows, state_of
from tests.faults.test_reward_faults import evaluated, faults, run, without_count
from tests.unit.rewards import faulty
from trlx_like.errors import RewardError

torch.set_num_threads(1)

NAME = "DDPOTrainer"
GOALS = [{"prompt": text, "goals": {"name": "x"}} for text in PROMPTS]
ABSTAIN = {"reward.on_error": "abstain", "reward.sample_time_limit": 20.0, "prompts": GOALS}
WORKER = {"reward.workers": 1}
FAULTS: dict[str, tuple[Mapping[str, Any], str]] = {
    "raises": ({}, "raised"),
    "wrong_length": (WORKER, "wrong length"),
    "wrong_type": ({}, "wrong type"),
    "nan": ({}, "not finite"),
    "inf": (WORKER, "not finite"),
    "none": ({}, "wrong type"),
    "hangs": ({"reward.sample_time_limit": 0.3}, "time limit"),
    "hangs_for_good": ({**WORKER, "reward.sample_time_limit": 0.5}, "time limit"),
    "exits": (WORKER, "died"),
    "hogs": ({**WORKER, "reward.worker_memory": 200}, "memory limit"),
}


# The runner does not look at what it hands on: two of them show the same for tensors.
CASES = [("pil", name) for name in FAULTS] + [("tensor", "raises"), ("tensor", "wrong_length")]
QUICK = ("raises", "wrong_length", "hogs")  # tests/faults/test_reward_faults.py has them all, of text


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The run whose function abstains where the others fail, and its folder. Called with the type of images."""

    @functools.cache
    def made(kind: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(kind)
        changes = {"method.image_type": kind, "prompts": GOALS, "reward_fn": faulty.even_images}
        return run(NAME, folder, **changes), folder

    return made


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] not in QUICK)) for case in CASES]
)
def test_a_run_with_faults_is_one_with_abstentions(
    kind: str, name: str, expected: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """Bit by bit; and each fault is on record with its prompt, and without its pixels."""
    without, folder = expected(kind)
    options, wanted = FAULTS[name]
    changes = {**ABSTAIN, **options, "method.image_type": kind, "reward_fn": faulty.OddImages(name)}
    got = run(NAME, tmp_path, **changes)
    assert_same(state_of(got), state_of(without), "state")
    assert_same(without_count(rows(tmp_path)), without_count(rows(folder)))
    assert_same(rows(tmp_path, "samples.jsonl"), rows(folder, "samples.jsonl"))
    found = faults(tmp_path)
    assert found and {(line["kind"], line["count"]) for line in found} == {(wanted, 1)}
    shown = {"pil": "an image of 8 x 8 pixels, RGB", "tensor": "a tensor of shape (3, 8, 8)"}[kind]
    assert all(line["prompts"][0] in PROMPTS and line["images"] == [shown] for line in found)
    assert all(line["metadata"] == [{"goals": {"name": "x"}}] for line in found)
    assert max(len(json.dumps({**line, "traceback": ""})) for line in found) < 600
    counted = sum(row.get("rollout/reward_faults", 0) for row in rows(tmp_path))
    unscored = sum(row["reward"] is None for row in evaluated(tmp_path))
    assert 0 < counted == len(found) - unscored and not faults(folder)


@pytest.mark.parametrize(("kind", "workers"), [("pil", 0), ("pil", 1), ("tensor", 0)])
def test_what_a_function_does_beside_its_work_does_no_harm(
    kind: str, workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It paints its images black: the other function, the files and the metrics have them as they were drawn."""
    prompts = [{"prompt": text, "goals": {"name": "x"}} for text in PROMPTS]
    changes = {"method.image_type": kind, "prompts": prompts, "train.epochs": 1}
    tidy = run(NAME, tmp_path / "tidy", **changes, reward_fn=[faulty.size_of, faulty.size_of])
    capfd.readouterr()
    tried = {"paints": [faulty.blackens, faulty.size_of], "prints": [faulty.prints_images] * 2}
    for name, functions in tried.items():
        got = run(NAME, tmp_path / name, **changes, reward_fn=functions, **{"reward.workers": workers})
        assert_same(state_of(got), state_of(tidy), "state")
        for path in (tmp_path / "tidy" / "images").rglob("*.png"):
            if path.parent.name != "images":  # the page of all has the rewards' names in it
                assert path.read_bytes() == (tmp_path / name / path.relative_to(tmp_path / "tidy")).read_bytes()
    assert prompts == GOALS
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 4


def test_what_is_scored_once_is_what_is_learned_from(tmp_path: Path) -> None:
    """A function that counts: every number is of one image, in the tables as in the advantages."""
    changes = {"method.grid_interval": 1, "method.advantages": "round", "method.adv_clip": 5.0, "train.epochs": 1}
    trainer = run(NAME, tmp_path, **changes, **WORKER, reward_fn=faulty.counts_images)
    table = rows(tmp_path, "samples.jsonl")
    trained = [row for row in table if row["table"] == "training"]
    assert sorted(row["reward"] for row in table) == list(range(1, len(table) + 1))
    scores = np.array([row["reward"] for row in trained])
    advantages = [float(element.advantages) for element in trainer.store.elements]
    assert advantages == pytest.approx((scores - scores.mean()) / (scores.std() + 1e-6), rel=1e-5)
    assert advantages == pytest.approx([row["advantage"] for row in trained])


def test_rewards_that_are_awaited(tmp_path: Path) -> None:
    """In this process and in workers, alone and beside others: the run of the function that does not wait."""
    plain = run(NAME, tmp_path / "plain", reward_fn=faulty.size_of)
    for workers in (0, 2):
        folder = tmp_path / f"later{workers}"
        later = run(NAME, folder, reward_fn=faulty.size_of_later, **{"reward.workers": workers})
        assert_same_run(later, plain, folder, tmp_path / "plain")
    both = run(NAME, tmp_path / "both", reward_fn=[faulty.size_of_later, faulty.size_of])
    first = evaluated(tmp_path / "both")[0]
    assert first["reward"] == 2 * first["reward/size_of"] == 2 * first["reward/size_of_later"]
    assert both.progress.step == plain.progress.step


WHOLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda scores: [int(score) for score in scores],
    "numpy": lambda scores: np.array(scores, dtype=np.int64),
    "tensor": lambda scores: torch.tensor(scores).long(),
    "bool": lambda scores: [score > 25 for score in scores],
}


@pytest.mark.parametrize("kind", few(WHOLE, kept=[next(iter(WHOLE))]))
def test_whole_numbers_are_floats(kind: str, tmp_path: Path) -> None:
    """TRL's statistics cut the advantages of 1 2 3 4 to -1 0 0 1."""

    def floats(images: Any) -> list[float]:
        return [float(score) for score in WHOLE[kind](faulty.size_of(images))]

    options = {"method.adv_clip": 5.0, "train.epochs": 1}
    expected = run(NAME, tmp_path / "floats", reward_fn=floats, **options)
    got = run(NAME, tmp_path / kind, reward_fn=lambda images: WHOLE[kind](faulty.size_of(images)), **options)
    assert_same_run(got, expected, tmp_path / kind, tmp_path / "floats")
    assert any(float(element.advantages) % 1 for element in got.store.elements)


@pytest.mark.parametrize("workers", [0, 1])
def test_by_default_a_fault_ends_the_run_with_one_message(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = (
        r"^OddImages raised ValueError: no reward for bad\n  on 3 samples, of which this is the first:\n  prompt: 'ab'"
    )
    with caplog.at_level(logging.WARNING), pytest.raises(RewardError, match=message) as error:
        run(NAME, tmp_path, reward_fn=faulty.OddImages("raises"), **{"reward.workers": workers})
    (line,) = faults(tmp_path)
    assert line["prompts"] == PROMPTS[:3] and line["images"] == ["an image of 8 x 8 pixels, RGB"] * 3
    assert "PIL" not in str(error.value) and "in raises\n" in line["traceback"]
