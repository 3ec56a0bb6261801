"""Signs of divergence, and the way back to a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, make
from trlx_like.errors import CheckpointError, ConfigError, DivergenceError
from trlx_like.trainers.base import LossOutput
from trlx_like.trainers.divergence import FEWEST_LOSSES

OPTIONS = {"train.epochs": 100, "train.total_steps": 8, "train.checkpoint_interval": 2, "train.eval_interval": 100}


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"losses/total_loss": -60.0}, "losses/total_loss is 60, more than 100 times its median 0.5"),
        ({"policy/entropy": 0.0}, "policy/entropy is 0, so the policy always says the same"),
        ({"policy/kl": 2.5}, r"policy/kl is 2.5, above train.stop_kl \(2\)"),
    ],
)
def test_a_sign_is_warned_of_once_or_ends_the_run(
    metrics: dict[str, float], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for action in ("warn", "stop"):
        trainer = make("PPOTrainer", tmp_path, **{"train.on_divergence": action, "train.stop_kl": 2.0})
        trainer.progress.losses = [0.5, -0.5] * FEWEST_LOSSES
        ordinary = {"losses/total_loss": 49.0, "policy/entropy": 0.1, "policy/kl": 1.9}
        trainer.divergence_watch.watch(ordinary)
        if action == "stop":
            with pytest.raises(DivergenceError, match=words):
                trainer.divergence_watch.watch({**ordinary, **metrics})
            continue
        with caplog.at_level(logging.WARNING):
            trainer.divergence_watch.watch({**ordinary, **metrics})
            trainer.divergence_watch.watch({**ordinary, **metrics})
        assert caplog.text.count("may have diverged") == 1


def test_losses_of_policy_gradients_are_near_0_and_no_sign(tmp_path: Path) -> None:
    trainer = make("GRPOTrainer", tmp_path, **{"train.on_divergence": "stop"})
    trainer.progress.losses = [1e-9] * FEWEST_LOSSES
    trainer.divergence_watch.watch({"losses/total_loss": 0.9})
    assert trainer.progress.losses[-1] == 0.9


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_kl_that_is_not_measured_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    """What the configuration says of a trainer is what it logs, with and without a weight of the KL."""
    with_kl = {"method.beta": 0.1} if name in ("GRPOTrainer", "RLOOTrainer") else {}
    for changes in [with_kl, {"method.beta": 0.0}][: 1 + bool(with_kl)]:
        options = {**changes, "train.total_steps": 1}
        try:
            trainer = make(name, tmp_path, **options, **{"train.stop_kl": 1e9})
        except ConfigError as error:
            assert f"train.stop_kl: 1000000000.0 needs policy/kl, which {name} does not measure with this" in str(error)
            trainer = make(name, tmp_path, **options)
            assert "policy/kl" not in trainer.learn()
        else:
            assert "policy/kl" in trainer.learn()


def spike(trainer: Any, step: int, times: int) -> None:
    """Multiply the loss of a step by 1,000, the first times that it comes."""
    loss, left = trainer.loss, [times]

    def spiked(batch: Any) -> LossOutput:
        output: LossOutput = loss(batch)
        if trainer.progress.step + 1 != step or not left[0]:
            return output
        left[0] -= 1
        unit, total = next(iter(output.sums("units").items()))
        return LossOutput({"spike": (total * 1000, unit)}, output.metrics)

    trainer.loss = spiked


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trlx_like.trainers.divergence.FEWEST_LOSSES", 3)


@pytest.mark.parametrize("name", ["SFTTrainer", "PPOTrainer", "DPOTrainer"])
@pytest.mark.usefixtures("early")
def test_a_rollback_goes_on_from_the_newest_checkpoint_with_a_smaller_rate(name: str, tmp_path: Path) -> None:
    trainer = make(name, tmp_path, **OPTIONS, **{"train.on_divergence": "rollback", "train.rollback_lr_factor": 0.1})
    spike(trainer, 6, times=1)
    trainer.learn()
    _, event = rows(tmp_path, "history.jsonl")
    rate = event.pop("learning_rate")
    assert "losses/total_loss" in event.pop("why")
    assert event == {"event": "rollback", "step": 6, "to_step": 4}
    logged = [row for row in rows(tmp_path, "metrics.jsonl") if "learning_rate" in row]
    assert [row["step"] for row in logged] == list(range(1, 9))
    assert rate == pytest.approx(logged[3]["learning_rate"] * 0.1, rel=0.2)
    assert all(row["learning_rate"] <= rate * 1.01 for row in logged[4:])
    assert (trainer.progress.step, trainer.progress.rollbacks) == (8, 1)


def test_a_model_that_cannot_be_sampled_from_is_no_newer_checkpoint(tmp_path: Path) -> None:
    """Finite weights whose logits are NaN: the round of step 5 ends, and the run goes on from step 4."""
    trainer = make("GRPOTrainer", tmp_path, **{**OPTIONS, "train.total_steps": 5, "train.on_divergence": "rollback"})
    make_experience = trainer.make_experience

    def after_spoiling() -> Any:
        if trainer.progress.step == 4 and not trainer.progress.rollbacks:
            with torch.no_grad():
                trainer.model.lm.lm_head.weight.mul_(1e30)
                trainer.model.lm.transformer.ln_f.weight.mul_(1e30)
        return make_experience()

    trainer.make_experience = after_spoiling
    trainer.learn()
    _, event = rows(tmp_path, "history.jsonl")
    assert "NaN or infinite scores of the next token" in event["why"]
    assert (event["to_step"], trainer.progress.step, trainer.progress.rollbacks) == (4, 5, 1)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.usefixtures("early")
def test_rollbacks_add_up_and_end(saved: bool, tmp_path: Path) -> None:
    rollback = {"train.on_divergence": "rollback", "train.max_rollbacks": 2, "train.save_optimizer": saved}
    trainer = make("SFTTrainer", tmp_path, **OPTIONS, **rollback)
    spike(trainer, 6, times=100)
    with pytest.raises(DivergenceError, match="The run was rolled back 2 times before"):
        trainer.learn()
    _, first, second = rows(tmp_path, "history.jsonl")
    assert second["learning_rate"] == pytest.approx(first["learning_rate"] / 2)
    assert second["to_step"] == first["to_step"] == 4


@pytest.mark.usefixtures("early")
def test_without_a_checkpoint_there_is_no_way_back(tmp_path: Path) -> None:
    options = {**OPTIONS, "train.checkpoint_interval": 100, "train.save_best": False}
    trainer = make("SFTTrainer", tmp_path, **options, **{"train.on_divergence": "rollback"})
    spike(trainer, 6, times=100)
    with pytest.raises(DivergenceError, match="It cannot be rolled back") as ended:
        trainer.learn()
    assert ended.value.exit_code == 1 and not isinstance(ended.value, CheckpointError)


@pytest.mark.usefixtures("early")
def test_a_run_resumed_after_a_rollback_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    options = {**OPTIONS, "train.on_divergence": "rollback", "train.checkpoint_interval": 1}
    whole = make("SFTTrainer", tmp_path / "whole", **options)
    spike(whole, 6, times=1)
    whole.learn()
    assert whole.progress.rollbacks == 1
    resumed = make("SFTTrainer", tmp_path / "resumed", **options)
    resumed.load(tmp_path / "whole" / "checkpoint_7")
    resumed.learn()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
