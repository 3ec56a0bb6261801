"""What a run notes of the rows that it used, as far as the contract tests do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract import images
from tests.contract.recipes import PROMPTS, make
from tests.contract.runs import rows
from trlx_like.errors import RewardError
from trlx_like.tracking.ledger import check_ledger

AUTO = {"train.resume_from_checkpoint": "auto"}


def used(folder: Path) -> list[tuple[int, int | None, int, list[list[int]]]]:
    return [(row["step"], row.get("round"), row["epoch"], row["rows"]) for row in rows(folder, "ledger.jsonl")]


class Ties:
    """Rewards that are all equal in some rounds, from which Online DPO then makes no pair."""

    def __init__(self, rounds: Sequence[int]) -> None:
        self.rounds = rounds
        self.called = 0  # first by the evaluation at step 0, then once a round

    def __call__(self, outputs: Sequence[str], **_: Any) -> list[float]:
        self.called += 1
        tie = self.called - 1 in self.rounds
        return [0.0 if tie else float(row) for row in range(len(outputs))]


def online_dpo(folder: Path, rounds: Sequence[int], **changes: Any) -> Any:
    options = {"method.num_prompts": 3, "train.eval_interval": 1000, "metric_fn": None, **changes}
    return make("OnlineDPOTrainer", folder, reward_fn=Ties(rounds), **options)


def test_a_round_without_a_step_is_written_with_the_next_step(tmp_path: Path) -> None:
    trainer = online_dpo(tmp_path, [2, 4], **{"train.epochs": 4, "train.batch_size": 3})
    trainer.learn()
    assert trainer.progress.step == 2
    # Round 2 had no step, so round 3 made step 2; round 4 comes before a step 3 that is not made.
    assert [(step, round_) for step, round_, *_ in used(tmp_path)] == [(1, 1), (2, 2), (2, 2), (2, 3), (3, 4), (3, 4)]
    assert check_ledger(tmp_path) == (
        "Each row was used once and only once: 12 uses in 4 rounds, until step 3.",
        True,
    )


def test_a_longer_run_has_rounds_without_a_step_once(tmp_path: Path) -> None:
    options = {"train.batch_size": 3, "train.checkpoint_interval": 1}
    online_dpo(tmp_path / "whole", [3], **options, **{"train.epochs": 5}).learn()
    online_dpo(tmp_path / "parts", [3], **options, **{"train.epochs": 3}).learn()
    longer = online_dpo(tmp_path / "parts", [], **options, **AUTO, **{"train.epochs": 5})
    longer.learn()
    assert longer.progress.round == 5
    assert check_ledger(tmp_path / "parts")[1]


def test_a_round_that_failed_used_nothing(tmp_path: Path) -> None:
    class Fails(Ties):
        def __call__(self, outputs: Sequence[str], **keywords: Any) -> list[float]:
            if self.called == 2:
                self.called += 1
                raise ConnectionError("away")
            return super().__call__(outputs)

    options = {"train.batch_size": 3, "train.epochs": 4}
    trainer = online_dpo(tmp_path, [], **options)
    trainer.reward_fn = Fails([])
    with pytest.raises(RewardError):
        trainer.learn()
    trainer.learn()
    assert trainer.progress.round == 4
    assert [round_ for _, round_, *_ in used(tmp_path)] == [1, 2, 2, 3, 4, 4]
    assert check_ledger(tmp_path)[1]


def test_calls_of_a_function_are_counted(tmp_path: Path) -> None:
    make("DDPOTrainer", tmp_path, prompts=images.caption, eval_prompts=["a"], **{"train.epochs": 2}).learn()
    assert [row for *_, row in used(tmp_path)] == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]
    assert check_ledger(tmp_path)[1]


def test_every_response_of_rft_is_an_epoch_of_its_prompt(tmp_path: Path) -> None:
    make("RFTTrainer", tmp_path, **{"train.epochs": 3}).learn()
    every = [list(range(len(PROMPTS)))]
    assert [(round_, epoch, row) for _, round_, epoch, row in used(tmp_path)] == [
        *((1, epoch, every) for epoch in (0, 1, 2)),
        *((3, epoch, every) for epoch in (3, 4, 5)),
    ]
