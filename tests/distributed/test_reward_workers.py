"""Reward functions with faults on one of two processes: both go on, or both end; neither waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import PROMPTS, make
from tests.contract.runs import assert_same, state_of
from tests.distributed.ranks import on_ranks
from tests.unit.rewards.faulty import Odd
from trlx_like.errors import RewardError

RUN = {"train.batch_size": 4, "train.total_steps": 2, "train.eval_interval": 2, "metric_fn": None}


def learn(rank: int, name: str, folder: Path, changes: dict[str, Any]) -> Any:
    """What both should agree on, or the message that a run ends with."""
    trainer = make(name, folder, **RUN, **changes)
    try:
        trainer.learn()
    except RewardError as error:
        return str(error)
    metrics = {name: value for name, value in trainer.last_metrics.items() if not name.startswith("time/")}
    shared = {name: value for name, value in state_of(trainer).items() if not trainer.state.items[name].local}
    return {"shared": shared, "metrics": metrics}


def faults(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "reward_faults.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("raises", {"reward.workers": 0}),
        ("exits", {"reward.workers": 1}),
        ("hangs_for_good", {"reward.workers": 1, "reward.time_limit": 0.5}),
    ],
)
def test_a_fault_on_one_ends_both(fault: str, options: dict[str, Any], tmp_path: Path) -> None:
    told, failed = on_ranks(learn, "PPOTrainer", tmp_path, {"reward_fn": Odd(fault, rank=1), **options})
    assert failed.startswith("Odd ") and told == f"On process 1: {failed}"
    assert {line["rank"] for line in faults(tmp_path)} == {1}


@pytest.mark.parametrize("name", ["PPOTrainer", "GRPOTrainer"])
def test_both_go_on_without_what_one_lost(name: str, tmp_path: Path) -> None:
    changes = {"reward_fn": Odd("exits", rank=1), "reward.workers": 1, "eval_prompts": PROMPTS}
    options = {"reward.on_error": "abstain", "reward.sample_time_limit": 30.0}
    first, second = on_ranks(learn, name, tmp_path, {**changes, **options})
    assert_same(second, first)
    assert first["shared"]["progress"]["step"] == 2
    assert {line["rank"] for line in faults(tmp_path)} == {1}


def test_too_many_abstentions_on_one_end_both(tmp_path: Path) -> None:
    changes = {"reward_fn": Odd("nan", rank=1), "reward.on_error": "abstain", "reward.max_abstained": 0.0}
    first, second = on_ranks(learn, "PPOTrainer", tmp_path, {**changes, "eval_prompts": PROMPTS})
    assert first == second and first.endswith("reward.max_abstained is 0.")


def test_workers_of_the_main_process_score_for_all(tmp_path: Path) -> None:
    """The same as without workers and with each process for itself; the functions are two."""
    functions = {"reward_fn": [Odd("raises", rank=5), Odd("nan", rank=5)]}
    alone = on_ranks(learn, "PPOTrainer", tmp_path / "alone", functions)
    changes = {**functions, "train.reward_on_main_process": True, "reward.workers": 2}
    main = on_ranks(learn, "PPOTrainer", tmp_path / "main", changes)
    assert_same(main, alone)
    assert "reward/Odd_2/mean" in main[0]["metrics"]
