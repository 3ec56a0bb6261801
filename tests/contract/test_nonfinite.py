"""A step whose loss or gradient is NaN or infinite changes nothing; too many of them end the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import assert_same
from trlx_like.errors import NonFiniteError
from trlx_like.trainers.base import LossOutput
from trlx_like.trainers.callbacks import Callback

BAD_STEP = 2
OPTIONS = {"train.total_steps": 4, "train.epochs": 100, "train.checkpoint_interval": 1, "train.keep_checkpoints": 2}


class Weights(Callback):
    """Copies the trained weights, the optimiser's state and the metrics of every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.metrics: list[dict[str, float]] = []

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        moments = {
            f"{row}.{name}": value.clone()
            for row, state in trainer.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        self.seen.append({**trained, **moments})
        self.metrics.append(dict(metrics))


def spoil(trainer: Any, kind: str, steps: range) -> None:
    """Make the loss NaN, or the gradient of the first trained parameter infinite, in some steps."""
    loss = trainer.loss

    def spoiled(batch: Any) -> LossOutput:
        output: LossOutput = loss(batch)
        if trainer.progress.step + 1 not in steps or kind != "loss":
            return output
        main = next(iter(trainer.units(batch))) if isinstance(trainer.units(batch), dict) else "units"
        terms = {unit: (total * torch.nan, unit) for unit, total in output.sums(main).items()}
        return LossOutput(terms, output.metrics)

    trainer.loss = spoiled
    first = next(p for p in trainer.model.parameters() if p.requires_grad)
    if kind == "gradient":
        first.register_hook(lambda grad: grad * math.inf if trainer.progress.step + 1 in steps else grad)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_step_that_is_not_finite_changes_nothing(name: str, kind: str, tmp_path: Path) -> None:
    weights = Weights()
    trainer = make(name, tmp_path, **OPTIONS, callbacks=[weights])
    spoil(trainer, kind, range(BAD_STEP, BAD_STEP + 1))
    trainer.learn()
    before, after, later = weights.seen[BAD_STEP - 2 : BAD_STEP + 1]
    assert_same(after, before)
    assert any(not torch.equal(later[key], value) for key, value in after.items())
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert ["train/nonfinite_steps" in metrics for metrics in weights.metrics] == [False, True, False, False]
    (record,) = [json.loads(line) for line in (tmp_path / "nonfinite_steps.jsonl").read_text().splitlines()]
    assert record["step"] == BAD_STEP
    assert record["losses/total_loss" if kind == "loss" else "grad_norm"] in ("nan", "inf")


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    weights = Weights()
    trainer = make("SFTTrainer", tmp_path, **OPTIONS, **{"train.max_nonfinite_steps": 1}, callbacks=[weights])
    spoil(trainer, "loss", range(BAD_STEP, 100))
    with pytest.raises(NonFiniteError, match=r"2 steps in a row .* step 3 \(losses/total_loss, grad_norm\)") as ended:
        trainer.learn()
    assert ended.value.exit_code == 1
    again = make("SFTTrainer", tmp_path / "again", **OPTIONS)
    again.load(tmp_path)
    resumed = {name: p.detach() for name, p in again.model.named_parameters() if p.requires_grad}
    assert_same(resumed, {name: weights.seen[0][name] for name in resumed})
    assert again.progress.nonfinite_in_row == 2


def test_a_good_step_between_starts_the_count_again(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **OPTIONS, **{"train.max_nonfinite_steps": 1})
    spoil(trainer, "loss", range(2, 5, 2))
    trainer.learn()
    assert (trainer.progress.step, trainer.progress.nonfinite_steps) == (4, 2)


def test_a_round_by_hand_averages_over_the_steps_that_were_made(tmp_path: Path) -> None:
    """Two passes of two steps, of which the second is dropped and logs neither `policy/skipped` nor a usual loss."""
    trainer = make("PPOTrainer", tmp_path, **{"train.batch_size": 2})
    spoil(trainer, "loss", range(BAD_STEP, BAD_STEP + 1))
    queries = ["ab", "abc", "b", "zz"]
    metrics = trainer.step(queries, trainer.generate(queries), [1.0, 0.0, 0.5, 2.0])
    assert trainer.progress.step == 4
    assert metrics["policy/skipped"] == 0 and metrics["train/nonfinite_steps"] == 1
