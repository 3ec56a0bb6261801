"""A step whose loss, gradient or update is NaN or infinite changes nothing; too many of them end the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import RECIPES, make
from tests.contract.runs import assert_same
from trlx_like.checkpoint.tree import load_tree
from trlx_like.errors import ConfigError, NonFiniteError
from trlx_like.trainers.base import LossOutput
from trlx_like.trainers.callbacks import Callback

BAD_STEP = 2
OPTIONS = {"train.total_steps": 4, "train.epochs": 100, "train.checkpoint_interval": 1, "train.keep_checkpoints": 2}
SPLIT = {"train.batch_size": 4, "train.minibatch_size": 2}


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
    """Make the loss NaN, the gradient of the first trained parameter infinite, or it or its moment NaN by a step."""
    loss = trainer.loss

    def spoiled(batch: Any, **known: float) -> LossOutput:
        output: LossOutput = loss(batch, **known)
        if trainer.progress.step + 1 not in steps or kind != "loss":
            return output
        main = next(iter(trainer.units(batch))) if isinstance(trainer.units(batch), dict) else "units"
        terms = {unit: (total * torch.nan, unit) for unit, total in output.sums(main).items()}
        return LossOutput(terms, output.metrics)

    trainer.loss = spoiled
    first = next(p for p in trainer.model.parameters() if p.requires_grad)
    if kind == "gradient":
        first.register_hook(lambda grad: grad * math.inf if trainer.progress.step + 1 in steps else grad)

    def poison(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if trainer.progress.step + 1 in steps:
            moments = [value for value in optimizer.state[first].values() if value.dim()]
            with torch.no_grad():
                (first if kind == "update" else moments[-1]).view(-1)[0] = torch.nan

    if kind in ("update", "moment"):
        trainer.optimizer.optimizer.register_step_post_hook(poison)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "nonfinite_steps.jsonl").read_text().splitlines()]


HALF = {"model.dtype": "bfloat16"}


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.model is None])
def test_16_bit_weights_are_trained_as_an_adapter_or_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.dtype \('bfloat16'\).*backend.mixed_precision: bf16"):
        make(name, tmp_path, **HALF)
    if "adapter" in RECIPES[name].variants and name in ("PPOTrainer", "RewardTrainer", "SFTTrainer"):
        trainer = make(name, tmp_path, **{**OPTIONS, **RECIPES[name].variants["adapter"], **HALF})
        trainer.learn()
        kinds = {(p.requires_grad, p.dtype) for p in trainer.model.parameters()}
        assert {(True, torch.float32), (False, torch.bfloat16)} <= kinds and (True, torch.bfloat16) not in kinds
        assert math.isfinite(trainer.last_metrics["losses/total_loss"])


KINDS = ("loss", "gradient", "update", "moment")


@dataclass(frozen=True)
class Spoiled:
    """A run in which one step of each kind was not finite, in the order of `KINDS`: steps 2, 4, 6 and 8.

    first: name of the first trained parameter. saved: the weights of its last checkpoint.
    """

    watched: Weights
    rows: list[dict[str, Any]]
    trainer: Any
    first: str
    saved: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=list(RECIPES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Spoiled:
    folder, weights = tmp_path_factory.mktemp("run"), Weights()
    changes = {**OPTIONS, "train.total_steps": 2 * len(KINDS) + 1, "train.checkpoint_interval": 100}
    trainer = make(request.param, folder, **changes, callbacks=[weights])
    first = next(name for name, p in trainer.model.named_parameters() if p.requires_grad)
    for place, kind in enumerate(KINDS):
        spoil(trainer, kind, range(2 * place + 2, 2 * place + 3))
    trainer.learn()
    (checkpoint,) = folder.glob("checkpoint_*")
    return Spoiled(weights, records(folder), trainer, first, load_tree(checkpoint / "state" / "shared" / "model"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_changes_nothing(run: Spoiled, kind: str) -> None:
    bad = 2 * KINDS.index(kind) + 2
    before, after, later = run.watched.seen[bad - 2 : bad + 1]
    assert_same(after, before)
    assert any(not torch.equal(later[key], value) for key, value in after.items())
    for state in (run.trainer.model.state_dict(), run.saved):
        assert state and all(bool(value.isfinite().all()) for value in state.values())
    counted = ["train/nonfinite_steps" in metrics for metrics in run.watched.metrics]
    assert counted == [step % 2 == 0 for step in range(1, 2 * len(KINDS) + 2)]
    assert [row["step"] for row in run.rows] == [2, 4, 6, 8]
    record = run.rows[KINDS.index(kind)]
    assert record["parameter"] == (None if kind == "moment" else run.first)
    if kind in ("update", "moment"):
        assert record["not_finite"] == ["the weights or the optimizer's state after the step"]
        return
    assert record["losses/total_loss" if kind == "loss" else "grad_norm"] in ("NaN", "Infinity")
    assert (record["micro_batch"], record["rank"], record["bad_sample"]) == (0, 0, 0)
    assert record["samples"] and all(any(isinstance(v, str) for v in row.values()) for row in record["samples"])
    without = ("sftconfig", "rftconfig", "distillconfig", "dpoconfig", "ktoconfig", "rewardconfig")
    if run.trainer.method.name.lower() not in without:
        assert {"scores", "rewards"} & set(record["samples"][0])


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


def test_the_first_bad_sample_and_parameter_are_named(tmp_path: Path) -> None:
    """One response of the global batch has a NaN reward in its experience: it, and no other, is the bad sample."""
    trainer = make("PPOTrainer", tmp_path, **OPTIONS, **{**SPLIT, "train.max_nonfinite_steps": 0})
    made = trainer.make_experience

    def spoiled() -> Any:
        metrics = made()
        trainer.store.elements[3].advantages.fill_(torch.nan)
        return metrics

    trainer.make_experience = spoiled
    with pytest.raises(NonFiniteError) as ended:
        trainer.learn()
    (record,) = records(tmp_path)
    bad = record["samples"][record["bad_sample"]]
    assert len(record["samples"]) == 2
    assert ["NaN" in str(row["advantages"]) for row in record["samples"]] == [row is bad for row in record["samples"]]
    assert f"prompt {bad['prompt']!r}" in str(ended.value) and record["parameter"] in str(ended.value)


def test_nothing_is_saved_or_pruned_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    class Poison(Callback):
        def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
            if trainer.progress.step == 3:
                next(trainer.model.parameters()).data.view(-1)[0] = torch.nan

    trainer = make("SFTTrainer", tmp_path, **OPTIONS, callbacks=[Poison()])
    with pytest.raises(NonFiniteError, match="No checkpoint of step 3 is written: .* is not finite"):
        trainer.learn()
    kept = sorted(tmp_path.glob("checkpoint_*"))
    assert [path.name for path in kept] == ["checkpoint_1", "checkpoint_2"]
    again = make("SFTTrainer", tmp_path / "again", **OPTIONS)
    again.load(tmp_path)
    assert all(bool(p.isfinite().all()) for p in again.model.parameters())


def test_no_copy_is_made_for_steps_of_adam_that_are_known_to_be_harmless(tmp_path: Path) -> None:
    """Step 2 has a learning rate whose change overflows, so it is undone. Before step 5 a moment is written to."""
    weights, copied = Weights(), []

    class Change(Callback):
        def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> None:
            step = trainer.progress.step + 1
            trainer.optimizer.param_groups[0]["lr"] = 3e38 if step == 2 else 1e-3
            if step == 5:
                next(iter(trainer.optimizer.state.values()))["exp_avg"].view(-1)[0] = 1e25

    changes = {**OPTIONS, "train.total_steps": 5, "train.checkpoint_interval": 100, "train.max_grad_norm": None}
    trainer = make("SFTTrainer", tmp_path, **changes, callbacks=[weights, Change()])
    keep = trainer.optimisation.guard._keep

    def counted() -> Any:
        copied.append(trainer.progress.step + 1)
        return keep()

    trainer.optimisation.guard._keep = counted
    trainer.learn()
    assert copied == [2, 5]
    assert_same(weights.seen[1], weights.seen[0])
    assert [row["step"] for row in records(tmp_path)] == [2]
    assert any(not torch.equal(weights.seen[2][name], value) for name, value in weights.seen[1].items())


def test_a_step_that_was_replaced_is_undone(tmp_path: Path) -> None:
    """What is known of Adam is not known of a function in its place."""
    trainer = make("SFTTrainer", tmp_path, **OPTIONS)
    optimizer = trainer.optimizer.optimizer
    step = optimizer.step

    def replaced(*given: Any, **options: Any) -> Any:
        result = step(*given, **options)
        if trainer.progress.step + 1 == BAD_STEP:
            next(trainer.model.parameters()).data.view(-1)[0] = torch.nan
        return result

    optimizer.step = replaced
    trainer.learn()
    assert [row["step"] for row in records(tmp_path)] == [BAD_STEP]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_a_weight_that_something_else_makes_nan_in_a_step_ends_the_run(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **OPTIONS)
    make_step = trainer.run.backend.step

    def poisoned(optimizer: Any, accepted: bool) -> None:
        make_step(optimizer, accepted)
        if trainer.progress.step + 1 == BAD_STEP:
            next(trainer.model.parameters()).data.view(-1)[0] = torch.nan

    trainer.run.backend.step = poisoned
    with pytest.raises(NonFiniteError, match="Step 2 made .* the optimizer cannot have done it"):
        trainer.learn()
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_1"]


def test_an_update_that_cannot_be_undone_ends_the_run(tmp_path: Path) -> None:
    trainer = make("SFTTrainer", tmp_path, **OPTIONS, **{"train.undo_nonfinite_updates": False})
    spoil(trainer, "update", range(BAD_STEP, BAD_STEP + 1))
    with pytest.raises(NonFiniteError, match="Step 2 made .* and train.undo_nonfinite_updates is false"):
        trainer.learn()
    assert [path.name for path in tmp_path.glob("checkpoint_*")] == ["checkpoint_1"]
