"""The loop, with a trainer that fits a line: no language model is needed to see what it does with gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.contract.recipes import make
from tests.contract.runs import assert_same, rows, state_of
from tests.distributed.ranks import on_ranks
from tests.tiny import tiny_config
from trlx_like import BaseRLTrainer, Callback, LossOutput, TRLConfig
from trlx_like.config import METHODS, MethodConfig, register_method
from trlx_like.config.elsewhere import answers
from trlx_like.data import Experience, padded
from trlx_like.errors import ConfigError
from trlx_like.trainers.checks import refuse_removed_hooks
from trlx_like.trainers.optimise import Units
from trlx_like.trainers.ppo import PPOTrainer


class LineConfig(MethodConfig):
    """The section `method` of a trainer that fits y = w x."""

    passes: int = 1


@dataclass
class Points(Experience):
    """Points (x, y), any number of them."""

    x: Tensor = padded()  # [B, T]
    y: Tensor = padded()  # [B, T]
    mask: Tensor = padded(value=False)  # [B, T] bool


def points(*pairs: tuple[float, float]) -> Points:
    x, y = torch.tensor(pairs).T
    return Points(x, y, torch.ones_like(x).bool())


class LineTrainer(BaseRLTrainer[Points]):
    """Sum of (w x - y)^2 over points, in float64 so that numbers can be worked by hand."""

    method_class = LineConfig
    experience_class = Points
    data_of_a_round: ClassVar[list[Points]] = [points((1, 0), (2, 0)), points((3, 3)), points((1, 3))]
    rounds_made = 0
    model: nn.Linear

    def build(self, tokenizer: Any = None) -> None:
        self.model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.fill_(1.0)
        self.batches: list[int] = []
        self.evaluated: list[int] = []

    @property
    def passes(self) -> int:
        return super().passes if self.offline else int(self.method.passes)

    def make_experience(self) -> dict[str, float]:
        self.rounds_made += 1
        self.push_to_store(self.world.share(list(self.data_of_a_round)))
        return {"made": float(self.rounds_made)}

    def loss(self, batch: Points) -> LossOutput:
        self.batches.append(len(batch))
        error = (self.model(batch.x[..., None].double())[..., 0] - batch.y).square()
        return LossOutput(error[batch.mask].sum(), {"points": batch.mask.sum()})

    def units(self, batch: Points) -> Units:
        return float(batch.mask.sum())

    def evaluate(self) -> dict[str, float]:
        self.evaluated.append(self.progress.step)
        return {"metrics/fall": 1 - weight(self)}

    def save_pretrained(self, directory: str | Path, **_: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)


class OfflineLineTrainer(LineTrainer):
    offline = True


def line(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    kind: type[LineTrainer] = LineTrainer,
    callbacks: Sequence[Callback] = (),
) -> LineTrainer:
    """Make a trainer with its run in `folder`. options: dotted keys of the configuration ("train.seed")."""
    if "LineConfig" not in METHODS:
        register_method(LineConfig)
    sections = {
        "model": {"model_path": tiny_config()},  # never built
        "optimizer": {"name": "sgd", "kwargs": {"lr": 0.1}},
        "method": {"name": "LineConfig"},
        "train": {
            **{"trainer": "PPOTrainer", "seq_length": 8, "total_steps": 4, "epochs": 100, "batch_size": 3},
            **{"max_grad_norm": None, "checkpoint_dir": str(folder)},
        },
    }
    return kind(TRLConfig.update(sections, options or {}), callbacks=callbacks)


def weight(trainer: LineTrainer) -> float:
    return float(trainer.model.weight.detach())


# The step. At w = 1 the four points have errors 1, 2, 0 and -2, so the loss is (1 + 4 + 0 + 4) / 4 = 2.25 and the
# gradient 2 (1 * 1 + 2 * 2 + 3 * 0 + 1 * -2) / 4 = 1.5.


@pytest.mark.parametrize("minibatch_size", [None, 1, 3])
def test_a_step_by_hand(minibatch_size: int | None, tmp_path: Path) -> None:
    trainer = line(tmp_path, {"train.minibatch_size": minibatch_size})
    metrics = trainer.optimize(Points.collate(trainer.data_of_a_round))
    assert weight(trainer) == pytest.approx(1 - 0.1 * 1.5)
    expected = {"losses/total_loss": 2.25, "points": 1.0, "grad_norm": 1.5, "learning_rate": 0.1}
    assert metrics == pytest.approx(expected)
    assert trainer.batches == ([3] if minibatch_size in (None, 3) else [1, 1, 1])


class TermsTrainer(LineTrainer):
    """The squared error per point, half of |w| per batch row, and the largest x."""

    def loss(self, batch: Points) -> LossOutput:
        terms = {
            "fit": (super().loss(batch).sums("points")["points"], "points"),
            "size": (0.5 * self.model.weight.abs().sum() * len(batch), "rows"),
        }
        metrics = {
            "x": (batch.x[batch.mask].sum(), "points"),
            "x/max": (batch.x.max(), "max"),
            "x/min": (batch.x.min(), "min"),
        }
        return LossOutput(terms, {**metrics, "one": torch.tensor(float(batch.mask.sum()))})

    def units(self, batch: Points) -> Units:
        return {"points": float(batch.mask.sum()), "rows": len(batch)}


@pytest.mark.parametrize("minibatch_size", [None, 1])
def test_terms_have_denominators_of_their_own(minibatch_size: int | None, tmp_path: Path) -> None:
    """Four points in three rows: 2.25 of the points as above, and .5 |1| of the rows; the gradients are 1.5 and .5.
    The x are 1 2 3 1: with padding in one batch the smallest is 0.
    """
    trainer = line(tmp_path, {"train.minibatch_size": minibatch_size}, kind=TermsTrainer)
    batch = Points.collate(trainer.data_of_a_round)
    measured = trainer.optimisation.measure(list(trainer.microbatches(batch)), trainer.loss, trainer.units)
    metrics = trainer.optimize(batch)
    assert metrics["losses/total_loss"] == pytest.approx(2.75) and metrics["grad_norm"] == pytest.approx(2.0)
    assert weight(trainer) == pytest.approx(1 - 0.1 * 2.0)
    assert metrics["x"] == 7 / 4 and metrics["one"] == 1
    assert (metrics["x/min"], metrics["x/max"]) == (1 if minibatch_size else 0, 3)
    assert {name: metrics[name] for name in measured} == pytest.approx(measured)


def test_a_unit_that_is_not_counted_is_named(tmp_path: Path) -> None:
    class Forgetful(TermsTrainer):
        def units(self, batch: Points) -> dict[str, float]:
            return {"points": 1.0}

    trainer = line(tmp_path, kind=Forgetful)
    with pytest.raises(ValueError, match="over the unit 'rows', which units does not count: it counts points"):
        trainer.optimize(Points.collate(trainer.data_of_a_round))


def test_gradients_are_clipped_by_their_norm(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"train.max_grad_norm": 0.5})
    metrics = trainer.optimize(Points.collate(trainer.data_of_a_round))
    assert metrics["grad_norm"] == pytest.approx(1.5)
    assert weight(trainer) == pytest.approx(1 - 0.1 * 0.5, abs=1e-6)


def test_microbatches_are_of_like_length_and_have_no_padding_of_others(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"train.minibatch_size": 1})
    batch = Points.collate([points((1, 0), (2, 0), (3, 0)), points((4, 0)), points((5, 0), (6, 0))])
    parts = list(trainer.microbatches(batch))
    assert [part.x.tolist() for part in parts] == [[[4]], [[5, 6]], [[1, 2, 3]]]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_refused_step_changes_no_weight_but_counts(tmp_path: Path) -> None:
    class Choosy(LineTrainer):
        def accept(self, metrics: dict[str, float]) -> bool:
            return metrics["losses/total_loss"] < 2

    trainer = line(tmp_path, kind=Choosy)
    trainer.optimize(Points.collate(trainer.data_of_a_round))
    assert weight(trainer) == 1.0 and trainer.progress.step == 1
    trainer.optimize(points((1, 1.5))._map(lambda value: value[None]))  # loss .25, gradient -1
    assert weight(trainer) == pytest.approx(1.1)


def test_the_schedule_steps_once_a_step(tmp_path: Path) -> None:
    changes = {
        "scheduler.name": "linear",
        "scheduler.kwargs": {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 4},
    }
    trainer = line(tmp_path, changes)
    trainer.learn()
    assert [row["learning_rate"] for row in rows(tmp_path)[1:]] == pytest.approx([0.1, 0.075, 0.05, 0.025])


# The loop.


def test_a_round_is_made_then_passed_over_then_made_again(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"method.passes": 2, "train.total_steps": 5, "train.batch_size": 2})
    trainer.learn()
    # Three elements in batches of two: two steps a pass, four a round.
    assert [row.get("made") for row in rows(tmp_path)] == [None, 1, None, None, None, 2]
    assert trainer.batches == [2, 1, 2, 1, 2]


def test_offline_experience_is_made_once_and_epochs_are_passes(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"train.epochs": 3, "train.total_steps": 100}, kind=OfflineLineTrainer)
    trainer.learn()
    assert trainer.rounds_made == 1
    assert trainer.progress.step == 3


def test_every_pass_has_its_own_order(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"method.passes": 8, "train.batch_size": 1})
    trainer.make_experience()
    trainer.begin_round()

    def order() -> list[float]:
        return [float(batch.x[0, 0] + batch.y[0, 0]) for batch in trainer.round_batches() if batch is not None]

    seen = order()
    orders = {tuple(seen[i : i + 3]) for i in range(0, 24, 3)}
    assert all(sorted(order) == [1, 4, 6] for order in orders)
    assert len(orders) > 2
    trainer.begin_round()
    assert order() != seen


def test_evaluations_and_checkpoints_come_at_their_intervals_and_at_the_end(tmp_path: Path) -> None:
    changes = {"train.total_steps": 7, "train.eval_interval": 3, "train.checkpoint_interval": 2}
    trainer = line(tmp_path, {**changes, "train.save_best": False})
    trainer.learn()
    assert trainer.evaluated == [0, 3, 6, 7]
    assert ["metrics/fall" in row for row in rows(tmp_path)] == [s in (0, 3, 6, 7) for s in range(8)]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == [f"checkpoint_{s}" for s in (2, 4, 6, 7)]


def test_learn_returns_the_last_of_every_metric(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"method.passes": 4})
    metrics = trainer.learn()
    assert metrics["made"] == 1.0
    assert metrics["metrics/fall"] == 1 - weight(trainer)
    assert metrics["losses/total_loss"] == rows(tmp_path)[-1]["losses/total_loss"]


def test_a_trainer_that_learns_on_continues_its_run(tmp_path: Path) -> None:
    whole = line(tmp_path / "whole", {"train.eval_interval": 1})
    whole.learn()
    trainer = line(tmp_path / "parts", {"train.eval_interval": 1, "train.total_steps": 2})
    trainer.learn()
    torch.rand(3)  # what the program draws in between is its own affair
    trainer.config.train.total_steps = 4
    trainer.learn()
    assert weight(trainer) == weight(whole)
    assert_same(rows(tmp_path / "parts"), rows(tmp_path / "whole"))


# Callbacks.


class Diary(Callback):
    """Writes down every call."""

    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, trainer: Any) -> None:
        self.calls.append("begin")

    def on_experience(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"made {metrics['made']:.0f}")

    def on_step(self, trainer: Any, metrics: Mapping[str, float]) -> bool | None:
        self.calls.append(f"step {trainer.progress.step}")
        return False if trainer.progress.step == self.stop_at else None

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self.calls.append("evaluate")

    def on_save(self, trainer: Any, directory: Path) -> None:
        self.calls.append(directory.name)

    def on_train_end(self, trainer: Any) -> None:
        self.calls.append("end")


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    diary = Diary()
    changes = {"train.total_steps": 3, "train.eval_interval": 2, "train.best_metric": "metrics/fall"}
    line(tmp_path, changes, callbacks=[diary]).learn()
    assert diary.calls == [
        *("begin", "evaluate", "made 1", "step 1", "made 2", "step 2", "best_checkpoint", "evaluate"),
        *("made 3", "step 3", "best_checkpoint", "evaluate", "checkpoint_3", "end"),
    ]


@pytest.mark.parametrize("callback", [TrainerCallback(), Diary], ids=["transformers", "class"])
def test_what_is_no_callback_is_refused(callback: Any, tmp_path: Path) -> None:
    name = getattr(callback, "__name__", "TrainerCallback")
    with pytest.raises(ConfigError, match=rf"callbacks: {name} is no Callback: .*on_experience, on_step, on_evaluate"):
        line(tmp_path, callbacks=[callback])


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    """It is evaluated and saved like one that came to its end."""
    diary = Diary(stop_at=2)
    line(tmp_path, callbacks=[Callback(), diary]).learn()
    assert diary.calls[-3:] == ["evaluate", "checkpoint_2", "end"]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


# Several processes.


def collected(rank: int, folder: Path, stops: tuple[int, int]) -> dict[str, Any]:
    changes = {"train.batch_size": 2, "train.total_steps": 4, "method.passes": 2}
    diary = Diary(stops[rank])
    trainer = line(folder, changes, callbacks=[diary])
    trainer.learn()
    return {"batches": trainer.batches, "calls": diary.calls, "weight": weight(trainer)}


def test_processes_step_together(tmp_path: Path) -> None:
    """One has two elements and the other one, a batch each: two steps with data for both, then two for one alone."""
    first, second = on_ranks(collected, tmp_path, (0, 0))
    assert first["weight"] == second["weight"]
    assert (first["batches"], second["batches"]) == ([1] * 4, [1] * 2)
    assert first["calls"] == second["calls"]


def test_a_callback_of_one_process_ends_the_run_of_all(tmp_path: Path) -> None:
    for ended in on_ranks(collected, tmp_path, (0, 2)):
        assert ended["calls"][-4:] == ["step 2", "evaluate", "checkpoint_2", "end"]


# What is said and refused.


def test_the_first_line_says_how_many_processes_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trlx_like"):
        line(tmp_path)
    assert caplog.messages[0] == "LineTrainer: 1 process on cpu, at most 4 steps of 3 samples."


def test_a_method_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train.trainer \(LineTrainer\) needs method.name: LineConfig, not PPOConfig"
    ):
        line(tmp_path, {"method.name": "PPOConfig", "train.seq_length": 64})


def test_keyword_arguments_that_nobody_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PPOTrainer cannot use depth; it takes eval_prompts, prompts\."):
        make("PPOTrainer", tmp_path, **{"train.trainer_kwargs": {"depth": 3}})


def test_without_the_optimizer_a_checkpoint_has_only_the_rest(tmp_path: Path) -> None:
    trainer = line(tmp_path, {"train.save_optimizer": False})
    assert not {"optimizer", "scheduler"} & set(state_of(trainer))
    assert {"model", "progress", "rng", "store"} <= set(state_of(trainer))


def test_without_the_optimizer_a_resumed_run_goes_on_with_the_schedule(tmp_path: Path) -> None:
    falling = {"scheduler.name": "linear", "scheduler.kwargs": {"num_training_steps": 8}, "train.save_optimizer": False}
    line(tmp_path, {**falling, "train.total_steps": 4}).learn()
    resumed = line(tmp_path, {**falling, "train.total_steps": 6, "train.resume_from_checkpoint": "auto"})
    assert resumed.learn()["learning_rate"] == pytest.approx(0.1 * 3 / 8)  # 1, 7/8, 6/8, 5/8; resumed: 4/8, 3/8


def test_a_hook_that_is_gone_is_refused_with_the_new_one(tmp_path: Path) -> None:
    class Older(LineTrainer):
        def counts(self, batch: Points) -> dict[str, float]:
            return {}

    with pytest.raises(ConfigError, match="Older.counts is not called by the loop: return counts by name from units"):
        line(tmp_path, kind=Older)


@pytest.mark.parametrize("hook", answers("hooks"))
def test_hooks_of_trlx_and_trl_are_refused(hook: str, tmp_path: Path) -> None:
    kind = type("Theirs", (LineTrainer,), {hook: lambda self, *args: None})
    with pytest.raises(ConfigError, match=rf"Theirs\.{hook} is not called by the loop: [a-z]"):
        line(tmp_path, kind=kind)


def test_what_only_a_loop_by_hand_calls_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Mine(PPOTrainer):
        def generate(self, queries: Any, **gen_kwargs: Any) -> Any:
            return super().generate(queries, **gen_kwargs)

    for kind, expected in ((PPOTrainer, []), (Mine, ["Mine.generate is called by your code only"])):
        caplog.clear()
        refuse_removed_hooks(kind)
        assert [text.partition(";")[0] for text in caplog.messages] == expected


def test_functions_of_trlx_for_learn_are_refused_with_the_callback(tmp_path: Path) -> None:
    trainer = line(tmp_path)
    for name, hook in (("log_fn", "on_step"), ("save_fn", "on_save"), ("eval_fn", "on_evaluate")):
        with pytest.raises(ConfigError, match=rf"learn\({name}=...\): pass callbacks=.* a Callback with {hook}, which"):
            trainer.learn(**{name: print})
        assert hasattr(Callback, hook)
    with pytest.raises(ConfigError, match="learn takes no speed"):
        trainer.learn(speed=2)
