"""One optimiser step, by hand: sums that are divided once, steps that are refused or undone, and learning rates.

The model is w . x with w = (1, -1), and the optimizer is plain gradient descent with a learning rate of 1/2.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.ranks import on_ranks
from trlx_like.data import Experience
from trlx_like.distributed import NamedNumbers
from trlx_like.distributed.replicated import LONG, clip, total_norm
from trlx_like.errors import ConfigError
from trlx_like.presets import PRESETS
from trlx_like.trainers.context import Run
from trlx_like.trainers.optimise import LossOutput, MetricSums, Optimisation, Totals, Units

torch.set_num_threads(1)
# Some steps are refused, and the optimiser then never gets to its first, which is no reason to warn.
pytestmark = pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")

FALLING = {"name": "linear", "kwargs": {"num_warmup_steps": 0, "num_training_steps": 4}}  # 1/2, 3/8, 1/4, 1/8


@dataclass
class Points(Experience):
    x: Tensor  # [B, 2]


def points(*rows: tuple[float, float]) -> Points:
    return Points(torch.tensor(rows, dtype=torch.float32))


PARTS = [points((1, 0)), points((0, 2), (4, 4))]  # values 1; -2 and 0
# Mean over 3 rows: value -1/3, gradient ((1 + 0 + 4) / 3, (0 + 2 + 4) / 3) = (5/3, 2).
AFTER = [1 - 5 / 6, -2.0]


def network(dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(2, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, -1.0]]))
    return made


class Line:
    """The optimisation of the model, with a loss that is the sum of its values. `training`: the mode of each pass."""

    def __init__(self, folder: Path, model: nn.Module | None = None, **changes: Any) -> None:
        train = {"checkpoint_dir": str(folder), "batch_size": 4, "max_grad_norm": None, "total_steps": 4}
        sections = {"optimizer": {"name": "sgd", "kwargs": {"lr": 0.5}}, "scheduler": FALLING}
        config = PRESETS["sft"]().evolve(**{**sections, **changes, "train": {**train, **changes.get("train", {})}})
        self.model: Any = network() if model is None else model
        self.run = Run(config, "Line")
        self.optimisation = Optimisation(self.run, self.model)
        self.training: list[bool] = []

    def values(self, batch: Points) -> Tensor:
        self.training.append(self.model.training)
        values: Tensor = self.model(batch.x).squeeze(1)
        return values

    def loss(self, batch: Points) -> LossOutput:
        values = self.values(batch)
        return LossOutput(
            values.sum(), {"value": values.sum(), "low": (values.min(), "min"), "high": (values.max(), "max")}
        )

    def units(self, batch: Points) -> Units:
        return float(len(batch))

    def step(self, parts: list[Points] = PARTS, accept: bool = True) -> dict[str, float]:
        metrics, stop = self.optimisation.step(parts, self.loss, self.units, lambda metrics: accept)
        assert stop == 0
        return metrics

    @property
    def weights(self) -> list[float]:
        values: list[float] = self.model.weight.flatten().tolist()
        return values


def test_the_mean_over_all_units_is_descended(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.model.eval()
    metrics = line.step()
    assert line.weights == pytest.approx(AFTER)
    assert metrics.pop("grad_norm") == pytest.approx(math.sqrt(25 / 9 + 4))
    assert metrics == pytest.approx(
        {"losses/total_loss": -1 / 3, "value": -1 / 3, "low": -2, "high": 1, "learning_rate": 0.5}
    )
    assert line.training == [True, True] and line.run.progress.step == 1
    assert line.model.weight.grad is None
    assert line.step()["learning_rate"] == 0.375 and line.run.progress.step == 2


def test_gradients_are_clipped_and_their_norm_is_logged_before(tmp_path: Path) -> None:
    line = Line(tmp_path, train={"max_grad_norm": 1.0})
    norm = math.sqrt(25 / 9 + 4)
    assert line.step()["grad_norm"] == pytest.approx(norm)
    assert line.weights == pytest.approx([1 - 5 / 6 / norm, -1 - 1 / norm], abs=1e-5)


@pytest.mark.parametrize(("norm", "written"), [(0.5, False), (0.999_999, False), (1.0, True), (math.inf, True)])
def test_only_gradients_above_the_bound_are_multiplied(norm: float, written: bool) -> None:
    gradient, weight = torch.tensor([3.0, 4.0]), nn.Parameter(torch.zeros(2))
    weight.grad = gradient.clone()
    before = gradient._version
    clip([gradient], 1.0, torch.tensor(norm))
    assert (gradient._version > before) == written
    nn.utils.clip_grads_with_norm_([weight], 1.0, torch.tensor(norm).nan_to_num())
    assert torch.equal(gradient, weight.grad)


def test_without_a_gradient_or_a_bound_nothing_is_clipped() -> None:
    clip([], 1.0, torch.tensor(2.0))
    gradient = torch.tensor([3.0, 4.0])
    clip([gradient], None, torch.tensor(5.0))
    assert gradient.tolist() == [3, 4]


@pytest.mark.parametrize("size", [1, LONG - 1, LONG, LONG + 1, 8 * LONG + 1023, 64 * LONG])
def test_the_norm_of_many_gradients_is_right(size: int) -> None:
    """In float64 too. torch's own norm of 8 million numbers is 2e-4 too small on CPUs."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size))
    gradients = [numbers, torch.tensor([[3.0], [4.0]])]
    exact = math.sqrt(float(numbers.double().square().sum()) + 25)
    assert float(total_norm(gradients)) == pytest.approx(exact, rel=2e-6)
    for bad in (math.nan, math.inf):
        numbers[-1] = bad
        assert not math.isfinite(float(total_norm(gradients)))


def test_the_norm_of_a_gradient_in_another_order_is_right() -> None:
    gradient = torch.randn(3, LONG, generator=torch.Generator().manual_seed(0)).t()
    assert float(total_norm([gradient])) == pytest.approx(float(gradient.double().norm()), rel=2e-6)


def test_gradients_of_no_known_norm_stay() -> None:
    gradient = torch.tensor([3.0, math.nan])
    clip([gradient], 1.0, torch.tensor(math.nan))
    assert gradient[0] == 3


def test_a_step_puts_every_part_in_training_mode(tmp_path: Path) -> None:
    line = Line(tmp_path)
    part = torch.nn.Dropout(0.5).eval()
    line.model.add_module("part", part)
    line.step()
    assert line.model.training and part.training


def test_what_is_refused_changes_no_weight(tmp_path: Path) -> None:
    """The schedule and the number of steps go on, the gradients are dropped, and what is refused sees the metrics."""
    line, seen = Line(tmp_path), list[dict[str, float]]()

    def refuse(metrics: dict[str, float]) -> bool:
        seen.append(dict(metrics))
        return False

    line.optimisation.step(PARTS, line.loss, line.units, refuse)
    assert line.weights == [1, -1] and line.model.weight.grad is None
    assert seen[0]["value"] == pytest.approx(-1 / 3) and "grad_norm" in seen[0]
    assert line.run.progress.step == 1 and line.step()["learning_rate"] == 0.375
    assert line.weights == pytest.approx([1 - 0.375 * 5 / 3, -1 - 0.375 * 2])


def counted(batch: Points) -> Units:
    return {"tokens": 2.0, "pairs": float(len(batch))}


def test_each_term_is_divided_by_its_own_units(tmp_path: Path) -> None:
    """Three times the sum -1 over 4 tokens, and the squares 1 + 4 + 0 over 3 pairs."""
    line = Line(tmp_path)

    def loss(batch: Points) -> LossOutput:
        values = line.values(batch)
        terms = {
            "a": (2 * values.sum(), "tokens"),
            "b": (values.square().sum(), "pairs"),
            "c": (values.sum(), "tokens"),
        }
        return LossOutput(terms, {"value": (values.sum(), "pairs"), "main": values.sum()})

    metrics, _ = line.optimisation.step(PARTS, loss, counted, lambda metrics: True)
    assert metrics["losses/total_loss"] == pytest.approx(-3 / 4 + 5 / 3)
    assert metrics["value"] == pytest.approx(-1 / 3) and metrics["main"] == -1 / 4
    # The gradient: 3 (5, 6) / 4, and 2 (1 (1, 0) - 2 (0, 2) + 0 (4, 4)) / 3 = (2/3, -8/3).
    assert line.weights == pytest.approx([1 - (15 / 4 + 2 / 3) / 2, -1 - (18 / 4 - 8 / 3) / 2])


def test_less_than_one_unit_counts_as_one(tmp_path: Path) -> None:
    line = Line(tmp_path)
    for total, expected in [(0.0, -1.0), (0.25, -1.0), (1.0, -1.0), (2.0, -0.5)]:
        metrics = line.optimisation.measure(PARTS, line.loss, lambda batch, total=total: total / 2)  # type: ignore[misc]
        assert metrics["value"] == expected


@pytest.mark.parametrize(("units", "counts"), [({"tokens": 2.0, "rows": 1.0}, "tokens, rows"), ({}, "nothing")])
def test_a_unit_that_nobody_counts_is_refused(units: Units, counts: str, tmp_path: Path) -> None:
    line = Line(tmp_path)

    def loss(batch: Points) -> LossOutput:
        return LossOutput({"a": (line.values(batch).sum(), "pairs")})

    with pytest.raises(ValueError, match=f"over the unit 'pairs', which units does not count: it counts {counts}"):
        line.optimisation.step(PARTS, loss, lambda batch: units, lambda metrics: True)


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    line = Line(tmp_path)
    metrics = line.optimisation.measure(PARTS, line.loss, line.units)
    assert metrics == pytest.approx({"losses/total_loss": -1 / 3, "value": -1 / 3, "low": -2, "high": 1})
    assert line.weights == [1, -1] and line.model.weight.grad is None and line.run.progress.step == 0
    assert line.optimisation.measure([], line.loss, line.units) == {}


def test_a_loss_gets_the_statistics_of_the_whole_batch(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.optimisation.statistics = lambda part: {"level": line.values(part).sum()}
    seen: list[float] = []

    def loss(batch: Points, *, level: float) -> LossOutput:
        seen.append(level)
        return line.loss(batch)

    line.optimisation.step(PARTS, loss, line.units, lambda metrics: True)
    assert line.weights == pytest.approx(AFTER)
    line.optimisation.measure(PARTS, loss, line.units)
    # Afterwards the values are 1/6, -4 and -22/3.
    assert seen == pytest.approx([-1 / 3, -1 / 3, -67 / 18, -67 / 18])


def test_a_micro_batch_that_counts_nothing_adds_a_gradient_of_zero(tmp_path: Path) -> None:
    """Even where its loss is 0 itself."""
    line = Line(tmp_path)
    line.optimisation._take_part(points((1, 1)), line.loss, Totals({"units": 3.0}, "units", stop=0, parts=[1]))
    assert line.model.weight.grad.tolist() == [[0, 0]]


def test_a_step_runs_micro_batches_that_count_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They draw their own random numbers, those that count draw from the process's."""
    line = Line(tmp_path)
    given = [(PARTS[0], 1.0), (PARTS[1], 1.0), (points((9, 9)), 0.0)]
    monkeypatch.setattr(line.run.backend, "microbatches", lambda parts, counts: given)
    drawn: list[float] = []

    def level(part: Points) -> dict[str, Tensor]:
        drawn.append(torch.rand(()).item())
        return {"level": part.x.sum()}

    line.optimisation.statistics = level
    torch.manual_seed(0)
    wanted = torch.rand(2).tolist()
    torch.manual_seed(0)
    line.optimisation.step(PARTS, lambda part, level: line.loss(part), line.units, lambda metrics: True)
    assert line.weights == pytest.approx(AFTER) and len(line.training) == 3
    assert drawn[:2] == wanted and drawn[2] not in wanted


def test_a_probe_runs_both_passes_and_leaves_nothing(tmp_path: Path) -> None:
    line, gradients = Line(tmp_path), []
    line.model.eval()
    line.model.weight.register_hook(lambda gradient: gradients.append(gradient.tolist()))

    def loss(batch: Points) -> LossOutput:
        total = line.values(batch).sum()
        return LossOutput({"first": (total, "rows"), "second": (total, "pairs")})

    line.optimisation.probe(PARTS[1], loss)
    assert line.training == [True] and gradients == [[[2 * 4, 2 * 6]]]
    assert line.model.weight.grad is None and line.weights == [1, -1] and line.run.progress.step == 0


def test_extremes_are_those_of_all_processes(tmp_path: Path) -> None:
    class Two:
        """Another process has found -5 for both."""

        def exchange(self, own: dict[tuple[str, str], float]) -> list[dict[tuple[str, str], float]]:
            return [own, {("low", "min"): -5.0, ("high", "max"): -5.0}]

    line, exchanged = Line(tmp_path), Two()
    sums = MetricSums(exchanged)  # type: ignore[arg-type]
    sums.add(line.loss(PARTS[1]), "units")
    metrics, _ = sums.means(line.run, Totals({"units": 2.0}, "units", stop=0, parts=[1, 1]))
    assert (metrics["low"], metrics["high"]) == (-5, 0)


def test_sums_are_added_in_float64(tmp_path: Path) -> None:
    """2**24 + 1 is no number of float32."""
    line = Line(tmp_path)
    sums = MetricSums(NamedNumbers(line.run.world))
    for number in (2.0**24, 1.0):
        sums.add(LossOutput(torch.tensor(number)), "units")
    assert sums.means(line.run, Totals({"units": 1.0}, "units", stop=0, parts=[2]))[0] == {
        "losses/total_loss": 2.0**24 + 1
    }


def test_a_step_without_data_changes_no_weight(tmp_path: Path) -> None:
    line = Line(tmp_path)
    assert line.step([]) == {"grad_norm": 0.0, "learning_rate": 0.5}
    assert line.weights == [1, -1] and line.run.progress.step == 1


# Steps that are not finite.


def spoiled(line: Line) -> dict[str, float]:
    """A step whose second micro-batch has a NaN in its second row."""
    return line.step([points((1, 0)), points((0, 2), (math.nan, 4))])


def test_a_nan_is_dropped_and_its_sample_named(tmp_path: Path) -> None:
    line = Line(tmp_path)
    metrics = spoiled(line)
    assert line.weights == [1, -1] and metrics["train/nonfinite_steps"] == 1
    assert line.run.progress.nonfinite_in_row == 1 and line.run.progress.step == 1
    record = json.loads((tmp_path / "nonfinite_steps.jsonl").read_text())
    assert (record["micro_batch"], record["bad_sample"], record["parameter"]) == (1, 1, "weight")
    assert record["not_finite"] == ["losses/total_loss", "grad_norm"]
    assert "train/nonfinite_steps" not in line.step() and line.run.progress.nonfinite_in_row == 0
    assert line.weights == pytest.approx([1 - 0.375 * 5 / 3, -1 - 0.375 * 2])


def test_an_update_to_nan_is_undone(tmp_path: Path) -> None:
    line = Line(tmp_path)

    def poison(*_: Any) -> None:
        with torch.no_grad():
            line.model.weight.view(-1)[0] = torch.nan

    hook = line.optimisation.optimizer.optimizer.register_step_post_hook(poison)
    metrics = line.step()
    assert line.weights == [1, -1] and metrics["train/nonfinite_steps"] == 1
    record = json.loads((tmp_path / "nonfinite_steps.jsonl").read_text())
    assert record["not_finite"] == ["the weights or the optimizer's state after the step"]
    hook.remove()
    line.step()
    assert line.run.progress.nonfinite_in_row == 0 and line.weights != [1, -1]


# The optimizer and its schedule.


def test_only_what_is_to_be_trained_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), network())
    model[0].requires_grad_(False)
    line = Line(tmp_path, model)
    (group,) = line.optimisation.optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(model[1].weight)]
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"model.num_layers_unfrozen \(0\) leaves this trainer nothing to train"):
        Line(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_trained_only_if_frozen(dtype: torch.dtype, tmp_path: Path) -> None:
    frozen = network(dtype).requires_grad_(False)
    Line(tmp_path, nn.ModuleList([frozen, network()]))
    with pytest.raises(ConfigError, match=rf"dtype \('{str(dtype)[6:]}'\): weights that are trained need float32"):
        Line(tmp_path, nn.ModuleList([network(), network(dtype)]))
    Line(tmp_path, network(torch.float64))


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """The optimizer is large: a snapshot before each round leaves it out."""
    items = Line(tmp_path).run.state.items
    assert {name: item.small for name, item in items.items()} == {"optimizer": False, "scheduler": True}
    assert not Line(tmp_path, train={"save_optimizer": False}).run.state.items


def test_an_optimizer_of_another_run_gets_the_options_of_this_one(tmp_path: Path) -> None:
    line = Line(tmp_path, optimizer={"name": "sgd", "kwargs": {"lr": 0.5, "momentum": 0.25}})
    line.step()
    (group,) = line.optimisation.optimizer.param_groups
    parameters, momentum = group["params"], line.optimisation.optimizer.state[group["params"][0]]["momentum_buffer"]
    group.update({"lr": 7.0, "initial_lr": 7.0, "momentum": 0.0})
    schedule = line.optimisation.scheduler
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": [7.0], "last_epoch": 2, "_last_lr": [7.0]})
    line.run.folder.reschedule()
    assert (group["lr"], group["initial_lr"], group["momentum"]) == (0.375, 0.5, 0.25)
    assert group["params"] is parameters
    assert line.optimisation.optimizer.state[group["params"][0]]["momentum_buffer"] is momentum
    assert [line.step([])["learning_rate"] for _ in range(2)] == [0.375, 0.25]


def test_the_learning_rate_of_this_and_later_steps_is_scaled(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.step([])
    assert line.optimisation.scale_learning_rate(0.5) == 0.1875
    (group,) = line.optimisation.optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.1875, 0.25)
    line.step()
    assert line.weights == pytest.approx([1 - 0.1875 * 5 / 3, -1 - 0.1875 * 2])
    assert [line.step([])["learning_rate"] for _ in range(2)] == [0.125, 0.0625]


@pytest.mark.usefixtures("number_format")
def test_a_refused_step_in_fp16_leaves_the_scaler_ready(tmp_path: Path) -> None:
    line = Line(tmp_path, backend={"mixed_precision": "fp16"})
    assert list(line.run.state.items) == ["optimizer", "scheduler", "scaler"]
    scaler: Any = line.run.accelerator.scaler
    assert line.run.state.items["scaler"].item is scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})  # the first one overflows here
    line.step(accept=False)
    line.step()
    assert line.weights == pytest.approx([1 - 0.375 * 5 / 3, -1 - 0.375 * 2], abs=1e-3)


# Several processes.


def of_rank(rank: int, folder: str) -> tuple[dict[str, float], int, list[float]]:
    """A step of two processes: the first has all data, and the second was asked to stop."""
    line = Line(Path(folder))
    line.run.stop_request.code = 143 * rank

    def loss(batch: Points) -> LossOutput:
        values = line.values(batch)
        return LossOutput({"a": (values.sum(), "pairs")}, {"low": (values.min(), "min")})

    metrics, stop = line.optimisation.step([] if rank else PARTS, loss, counted, lambda metrics: True)
    return metrics, stop, line.weights


def test_processes_without_data_make_the_same_step(tmp_path: Path) -> None:
    first, second = on_ranks(of_rank, str(tmp_path))
    assert first == second
    metrics, stop, weights = first
    assert stop == 143 and weights == pytest.approx(AFTER)
    assert (metrics["losses/total_loss"], metrics["low"]) == pytest.approx((-1 / 3, -2))
