"""One optimiser step on a global batch, and the same measurement without a step on held-out data.

A loss is a sum over units (tokens, pairs, denoising steps, ...). It is divided once, by the number of units in all
micro-batches on all processes, so gradients do not depend on micro-batches, padding or the number of processes. A loss
of several terms names the unit of each, and each term is divided by the total of its own unit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import isolated_rng
from trlx_like.data import Experience
from trlx_like.distributed import NamedNumbers
from trlx_like.errors import ConfigError
from trlx_like.models.formats import refused_half
from trlx_like.optim import adopted, make_optimizer, make_scheduler, norms_and_biases
from trlx_like.trainers.context import Metrics, Run
from trlx_like.trainers.guard import UPDATE, Guard

E = TypeVar("E", bound=Experience)
Units = float | Mapping[str, float]
"""Number of units of a micro-batch. With several kinds of units: numbers by name, the main one first."""
Term = tuple[Tensor, str]
"""A sum [] and the name of the unit that it is taken over.

With the name "min" or "max" the tensor is not a sum: the smallest or largest of all micro-batches is taken.
"""

MAIN = "units"
"""Name of the unit if `units` returns one number."""
STOP, PARTS = "/stop", "/parts"
"""Numbers that travel with those of the units: the exit code of a stop request, and the number of micro-batches."""
EXTREMES = {"min": min, "max": max}
COMBINE = {"min": torch.minimum, "max": torch.maximum}


@dataclass
class LossOutput:
    """Hold what `loss` returns: sums over units, so that micro-batches and processes can be added up.

    Attributes:
        loss: The sum [] over the main unit, or terms by name, each a sum and its unit. The loss is the sum of the
            means of all terms.
        metrics: Values [] to log, each a sum over the main unit, or a sum and its unit.
    """

    loss: Tensor | Mapping[str, Term]
    metrics: Mapping[str, Tensor | Term] = field(default_factory=dict)

    def sums(self, main: str) -> dict[str, Tensor]:
        """Add up the terms of each unit; return sums [] by unit. `main` is the unit of a loss without terms."""
        if isinstance(self.loss, Tensor):
            return {main: self.loss}
        terms: dict[str, list[Tensor]] = {}
        for term, unit in self.loss.values():
            terms.setdefault(unit, []).append(term)
        return {unit: torch.stack(of_unit).sum() for unit, of_unit in terms.items()}

    def mean(self, totals: Mapping[str, float], main: str) -> Tensor:
        """Divide each sum by the global number of its units, and add up the means. []"""
        means = [total / _count(totals, unit) for unit, total in self.sums(main).items()]
        return means[0] if len(means) == 1 else torch.stack(means).sum()


def _count(totals: Mapping[str, float], unit: str) -> float:
    """Return the total that a sum is divided by, at least 1. ValueError for a unit that nobody counts."""
    if unit not in totals:
        counted = ", ".join(totals) or "nothing"
        raise ValueError(f"loss has a sum over the unit {unit!r}, which units does not count: it counts {counted}.")
    return max(totals[unit], 1.0)


@dataclass
class Totals:
    """Hold the number of units of a global batch by name, over all micro-batches and processes."""

    units: Mapping[str, float]
    main: str
    stop: int  # exit code if a process was asked to stop, else 0
    parts: Sequence[int]  # number of micro-batches of each process


class MetricSums:
    """Add up the metrics of one global batch.

    The sums stay on the device until `means` reads them all at once.

    Args:
        exchanged: Exchanges the sums between processes.
    """

    def __init__(self, exchanged: NamedNumbers[tuple[str, str]]) -> None:
        self._exchanged = exchanged
        self._sums: dict[tuple[str, str], Tensor] = {}  # by name and unit, each [] float64

    def add(self, output: LossOutput, main: str) -> None:
        """Add the loss and the metrics of one micro-batch."""
        for unit, total in output.sums(main).items():
            self._add("losses/total_loss", total, unit)
        for name, metric in output.metrics.items():
            self._add(name, *(metric if isinstance(metric, tuple) else (metric, main)))

    def _add(self, name: str, value: Tensor, unit: str) -> None:
        value, before = value.detach().double().reshape(()), self._sums.get((name, unit))
        self._sums[name, unit] = value if before is None else COMBINE.get(unit, torch.add)(before, value)

    def means(self, run: Run, totals: Totals, *others: Tensor) -> tuple[Metrics, list[float]]:
        """Divide the sums of all processes by the number of their units.

        Args:
            run: The run.
            totals: The units of the global batch.
            others: Further numbers [] to read from the device in the same transfer.

        Returns:
            The metrics by name, and the values of `others` on this process.
        """
        tensors = [*self._sums.values(), *(other.double() for other in others)]
        numbers = torch.stack([tensor.to(run.device) for tensor in tensors]).tolist() if tensors else []
        own = dict(zip(self._sums, numbers, strict=False))
        every = self._exchanged.exchange(own)
        metrics: Metrics = {}
        for name, unit in dict.fromkeys(key for part in every for key in part):
            values = [part[name, unit] for part in every if (name, unit) in part]
            if unit in EXTREMES:
                metrics[name] = EXTREMES[unit](values)
            else:
                metrics[name] = metrics.get(name, 0.0) + sum(values) / _count(totals.units, unit)
        return metrics, numbers[len(own) :]


class Optimisation:
    """Make optimiser steps on a model's trainable parameters, and measure a loss without a step.

    Args:
        run: The run. Its checkpoints will hold the optimiser and the scheduler.
        model: The network. Its parameters with `requires_grad` are trained.
        tokenizer: Decodes samples for the record of steps that are not finite; None for samples without token ids.
        statistics: Computes what the loss has to know of the whole batch, see `Verbs.statistics`; None: nothing.
        rate: The learning rate that "auto" stands for; None: that of a model of this process's trained weights.

    Raises:
        ConfigError: If no parameter is trainable, or a trained one has only 16 bits.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        tokenizer: Any = None,
        statistics: Callable[[Any], Mapping[str, Tensor | Term]] | None = None,
        rate: float | None = None,
    ) -> None:
        train = run.config.train
        self.run, self.model, self.statistics = run, model, statistics
        trained = run.backend.trained(model)
        if not trained:
            raise ConfigError("model.num_layers_unfrozen (0) leaves this trainer nothing to train.")
        if half := next((p.dtype for p in trained if p.dtype in (torch.float16, torch.bfloat16)), None):
            raise ConfigError(refused_half(str(half).removeprefix("torch.")))
        section = run.config.optimizer
        if isinstance(section.name, str):
            made = make_optimizer(trained, section, norms_and_biases(model), rate)
        else:
            made = adopted(section.name, model, run.config.model.model_path)
        self.optimizer = run.accelerator.prepare_optimizer(made)
        self.scheduler = make_scheduler(self.optimizer.optimizer, run.config.scheduler, train.total_steps)
        # The schedule goes on with dropped and resumed steps, too. Otherwise torch takes them for a mistake and warns.
        self.optimizer.optimizer._opt_called = True
        self._units: NamedNumbers[str] = NamedNumbers(run.world)
        self._metrics: NamedNumbers[tuple[str, str]] = NamedNumbers(run.world)
        self._statistics: NamedNumbers[tuple[str, str]] = NamedNumbers(run.world)
        options = [{**group, "params": ()} for group in self.optimizer.param_groups]
        self._fresh = copy.deepcopy((options, self.scheduler.state_dict()))
        run.folder.reschedule = self.reschedule
        self.guard = Guard(run, model, self.optimizer, tokenizer)
        if train.save_optimizer:
            run.state.register("optimizer", run.backend.stateful(self.optimizer), small=False)
            run.state.register("scheduler", self.scheduler)
        if run.accelerator.scaler is not None:
            run.state.register("scaler", run.accelerator.scaler)

    def reschedule(self) -> None:
        """Give a restored optimizer the options of the configuration, and its schedule the place of the run."""
        options, schedule = copy.deepcopy(self._fresh)
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update({**own, "params": group["params"]})
        self.scheduler.load_state_dict(schedule)
        for _ in range(self.run.progress.step):
            self.scheduler.step()

    def step(
        self,
        parts: Sequence[E],
        loss: Callable[..., LossOutput],
        units: Callable[[E], Units],
        accept: Callable[[Metrics], bool],
    ) -> tuple[Metrics, int]:
        """Make one optimiser step on a global batch. Every process calls it, even without data.

        Args:
            parts: This process's micro-batches. They are moved to the device.
            loss: Computes the loss of a micro-batch, as sums over units.
            units: Counts the units of a micro-batch.
            accept: Gets the metrics of the global batch before the step; returns False to drop the gradients.

        Returns:
            The metrics of the global batch, and an exit code if any process was asked to stop by a signal, else 0.
        """
        run, backend, totals = self.run, self.run.backend, self._totals(parts, units)
        # All at once: a copy to a GPU between two backward passes would wait for the first of them.
        parts = [part.to(run.device) for part in parts]
        if not all(part.training for part in self.model.modules()):  # which calls every module, each time
            self.model.train()
        loss = partial(loss, **self._known(parts, totals))
        sums = MetricSums(self._metrics)
        means: list[Tensor] = []
        for part, weight in backend.microbatches(parts, totals.parts):
            if not weight:
                self._take_part(part, loss, totals)
                continue
            with run.forward("forward"):
                output = loss(part)
            if not isinstance(output, LossOutput):  # such as the mean and the dictionary of trlX's trainers
                got = type(output).__name__
                raise ConfigError(f"loss() returned a {got}; it must be a LossOutput, with sums (docs/extending.md).")
            means.append(output.mean(totals.units, totals.main))
            with run.clock("backward"):
                backend.backward(means[-1])
            means[-1] = means[-1].detach()
            sums.add(output, totals.main)
        with run.clock("optimizer"):
            metrics, (norm, *losses) = sums.means(run, totals, backend.finish(), *means)
            metrics["grad_norm"] = norm
            nonfinite, undone = self.guard.nonfinite(metrics), None
            if nonfinite or not accept(metrics):
                backend.step(self.optimizer, accepted=False)
            else:
                undone = self.guard.step(lambda: backend.step(self.optimizer, accepted=True), norm)
                nonfinite = [] if undone is None else [UPDATE]
            if nonfinite:
                mean = lambda part: loss(part).mean(totals.units, totals.main)  # noqa: E731
                self.guard.drop(nonfinite, undone, metrics, parts, losses, mean)
            else:
                run.progress.nonfinite_in_row = 0
            backend.clear(self.optimizer)
            metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
            self.scheduler.step()
        run.progress.step += 1
        return metrics, totals.stop

    @torch.no_grad()
    def _known(self, parts: Sequence[E], totals: Totals) -> Metrics:
        """Return the statistics of the global batch that the loss needs."""
        if self.statistics is None:
            return {}
        sums = MetricSums(self._statistics)
        for part, weight in self.run.backend.microbatches(parts, totals.parts):
            with nullcontext() if weight else isolated_rng(self.run.config.train.seed), self.run.forward("forward"):
                found = self.statistics(part.to(self.run.device))
            if weight:
                sums.add(LossOutput({}, found), totals.main)
        return sums.means(self.run, totals)[0]

    def _take_part(self, part: Any, loss: Callable[[Any], LossOutput], totals: Totals) -> None:
        """Run a micro-batch that counts nothing, because other processes have one more and wait for this one."""
        with isolated_rng(self.run.config.train.seed):
            with self.run.forward("forward"):
                output = loss(part.to(self.run.device))
            with self.run.clock("backward"):
                self.run.backend.backward(0.0 * output.mean(totals.units, totals.main))

    def probe(self, part: E, loss: Callable[[E], LossOutput]) -> None:
        """Run one micro-batch forward and backward, and drop the gradients. Nothing else changes."""
        self.model.train()
        with self.run.forward("probe"):
            output = loss(part.to(self.run.device))
        with self.run.clock("probe"):
            self.run.backend.backward(torch.stack(list(output.sums(MAIN).values())).sum())
        self.run.backend.clear(self.optimizer)

    def scale_learning_rate(self, factor: float) -> float:
        """Multiply the learning rate of this and all later steps, and return that of the next step."""
        for group in self.optimizer.param_groups:
            for name in {"lr", "initial_lr", "max_lr", "min_lr"} & set(group):
                group[name] *= factor
        for schedule in getattr(self.scheduler, "_schedulers", [self.scheduler]):  # those of a SequentialLR
            schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        return float(self.scheduler.get_last_lr()[0])

    @torch.no_grad()
    def measure(self, parts: Sequence[E], loss: Callable[..., LossOutput], units: Callable[[E], Units]) -> Metrics:
        """Return the metrics that a step on this data would log, without a gradient or a step.

        The arguments are those of `step`. Every process calls it. If no process has data, there are no metrics.
        """
        totals = self._totals(parts, units)
        loss = partial(loss, **self._known(parts, totals))
        sums = MetricSums(self._metrics)
        for part in parts:
            with self.run.accelerator.autocast():
                sums.add(loss(part.to(self.run.device)), totals.main)
        return sums.means(self.run, totals)[0]

    def _totals(self, parts: Sequence[E], units: Callable[[E], Units]) -> Totals:
        """Count the units of the global batch, and find out whether any process was asked to stop."""
        counts = [count if isinstance(count, Mapping) else {MAIN: count} for count in map(units, parts)]
        own: dict[str, float] = {}
        for count in counts:
            for name, value in count.items():
                own[name] = own.get(name, 0.0) + value
        every = self._units.exchange({**own, STOP: self.run.stop_request.code, PARTS: len(parts)})
        stop, given = max(int(row.pop(STOP)) for row in every), [int(row.pop(PARTS)) for row in every]
        names = dict.fromkeys(name for row in every for name in row)
        totals = {name: sum(row.get(name, 0.0) for row in every) for name in names}
        return Totals(totals, next(iter(names), MAIN), stop, given)
