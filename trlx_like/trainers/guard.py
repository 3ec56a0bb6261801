"""Keeps NaN and infinity out of weights and optimiser state, and records the steps that would have caused them.

A step is dropped if its loss or its gradient is not finite. A step is undone if the weights or the optimiser's state
are not finite after it. That needs a copy of them, which is made only before steps that could end so, see `_harmless`.
All processes decide the same, because they decide on numbers of the global batch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trlx_like.checkpoint import isolated_rng
from trlx_like.data import Experience
from trlx_like.errors import NonFiniteError, writing
from trlx_like.models.finite import bounds
from trlx_like.optim import bounded
from trlx_like.tracking.values import plain
from trlx_like.trainers.context import Metrics, Row, Run

logger = logging.getLogger(__name__)

NONFINITE_FILE = "nonfinite_steps.jsonl"
"""File of the run folder with the steps that were dropped: metrics, loss and samples of the first bad micro-batch."""
UPDATE = "the weights or the optimizer's state after the step"
LARGEST = 1e30
"""Numbers up to this one do not overflow in a step: float32 and bfloat16 reach 3.4e38."""
LONGEST_TEXT = 500
"""Most characters of a text that the record and messages show."""


class Guard:
    """Undo optimiser steps whose result is not finite, and count and record all steps that are not finite.

    Args:
        run: The run.
        model: The network, to name its parameters.
        optimizer: The optimiser of the trained parameters.
        tokenizer: Decodes token ids for the record; None for samples without token ids.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: Any, tokenizer: Any = None) -> None:
        self.run, self.model, self.optimizer, self.tokenizer = run, model, optimizer, tokenizer
        self._copies: list[Tensor] = []  # memory for what a step may change, kept from step to step
        # The tensors that the two bounds are of, and how often each was written.
        self._known: list[tuple[int, int]] = []
        self._weights = self._moments = math.inf  # the largest of each is at most so large

    def nonfinite(self, metrics: Metrics) -> list[str]:
        """Name the parts of the loss that are not finite, and `grad_norm` if it is not.

        An overflow of fp16 gradients alone is left to the gradient scaler, which drops such steps itself.
        """
        names = [name for name, value in metrics.items() if not math.isfinite(value) and name.startswith("losses/")]
        if not math.isfinite(metrics["grad_norm"]) and self.run.accelerator.scaler is None:
            names.append("grad_norm")
        return names

    def step(self, make: Callable[[], None], grad_norm: float) -> str | None:
        """Make an optimiser step, and undo it if its result is not finite.

        Args:
            make: Makes the step.
            grad_norm: The norm of the gradients of all processes, before clipping.

        Returns:
            None if weights and optimiser state are finite after it. Otherwise they are as before it, and the name of
            the first parameter that was not finite is returned, "" if only the optimiser's state was not.

        Raises:
            NonFiniteError: If they are not finite, and `train.undo_nonfinite_updates` is off or something else than
                the optimizer wrote them.
        """
        harmless = not self.run.world.max(int(not self._harmless(grad_norm)))
        undo = self._keep() if self.run.config.train.undo_nonfinite_updates and not harmless else None
        make()
        largest = _largest(self._trained() if harmless else self._changed())
        if not self.run.world.max(int(not math.isfinite(largest))):
            self._weights, self._known = largest, self._versions() if harmless else []
            return None
        parameter = self._bad_parameter()  # every process calls it
        if undo is None:
            why = "the optimizer cannot have done it" if harmless else "train.undo_nonfinite_updates is false"
            raise NonFiniteError(
                f"Step {self.run.progress.step + 1} made {parameter or 'the state of the optimizer'} NaN or infinite, "
                f"and {why}, so it cannot be undone. Continue from the newest "
                "checkpoint with a smaller optimizer.kwargs.lr."
            )
        undo()
        return parameter or ""

    def _harmless(self, grad_norm: float) -> bool:
        """Return whether a step cannot make a number NaN or infinite, by the largest numbers that it reads.

        It is known of Adam. Its moments are means of gradients and of their squares, so none is larger than all of
        these, and a weight changes by at most lr / (1 - beta1) * |first moment| / eps (Kingma and Ba 2015,
        arXiv:1412.6980, algorithm 1, with the second moment at 0). A hook of the optimizer may do anything.
        """
        if not bounded(self.optimizer.optimizer):
            return False
        if self._known != self._versions():  # the first step, or somebody else wrote them, such as a checkpoint's load
            self._weights, self._moments = _largest(self._trained()), _largest(self._state())
        if not all(map(math.isfinite, (self._weights, self._moments, grad_norm))):
            return False
        weights = []  # the largest that each group could get
        for group in self.optimizer.param_groups:
            rate, decay, eps = (float(group[name]) for name in ("lr", "weight_decay", "eps"))
            gradient = grad_norm + decay * self._weights
            self._moments = max(self._moments, gradient, gradient * gradient)
            change = rate / (1 - float(group["betas"][0])) * self._moments / eps if eps > 0 else math.inf
            weights.append((1 + rate * decay) * self._weights + change)
        return all(number < LARGEST for number in (self._moments, *weights))

    def _versions(self) -> list[tuple[int, int]]:
        """Return what changes if anybody replaces or writes in place a tensor that a step changes."""
        return [(id(tensor), tensor._version) for tensor in self._changed()]

    def _trained(self) -> list[Tensor]:
        """List the trained parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _state(self) -> list[Tensor]:
        """List the tensors of the optimiser's state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [value for value in state if isinstance(value, Tensor)]

    def _changed(self) -> list[Tensor]:
        """List the trained parameters and the tensors of the optimiser's state."""
        return [*self._trained(), *self._state()]

    @torch.no_grad()
    def _keep(self) -> Callable[[], None]:
        """Copy what the step may change, into the same memory at every step; return what undoes the step."""
        tensors = self._changed()
        if [copy.shape for copy in self._copies] != [tensor.shape for tensor in tensors]:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._copies, tensors)
        states = {parameter: dict(values) for parameter, values in self.optimizer.state.items()}
        groups = [dict(group) for group in self.optimizer.param_groups]

        @torch.no_grad()
        def undo() -> None:
            torch._foreach_copy_(tensors, self._copies)
            self.optimizer.state.clear()
            self.optimizer.state.update(states)
            for group, values in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(values)

        return undo

    def drop(
        self,
        names: Sequence[str],
        parameter: str | None,
        metrics: Metrics,
        parts: Sequence[Experience],
        losses: Sequence[float],
        loss: Callable[[Any], Tensor],
    ) -> None:
        """Count, record and report a step that changed nothing. Every process calls it, before gradients are zeroed.

        Args:
            names: What is not finite.
            parameter: The first parameter that an update made NaN or infinite; None looks at the gradients.
            metrics: The metrics of the step; the count is added.
            parts: This process's micro-batches.
            losses: The loss of each.
            loss: Computes the loss [] of a micro-batch, to find the sample that it comes from. The gradients are used
                up in this.

        Raises:
            NonFiniteError: If more than `train.max_nonfinite_steps` steps in a row were dropped.
        """
        progress, limit = self.run.progress, self.run.config.train.max_nonfinite_steps
        progress.nonfinite_steps += 1
        progress.nonfinite_in_row += 1
        metrics["train/nonfinite_steps"] = float(progress.nonfinite_steps)
        step, row = progress.step + 1, progress.nonfinite_in_row
        parameter = self._bad_parameter() if parameter is None else parameter or None
        own = None if UPDATE in names else self._bad_sample(parts, losses, loss)
        samples = [found for found in self.run.world.gather([own]) if found is not None]
        sample = samples[0] if samples else {}
        record = {"step": step, "round": progress.round, "not_finite": list(names), "parameter": parameter, **sample}
        where = f"the first such parameter is {parameter}, " if parameter else ""
        about = f"{where}the first sample {_words(sample)}" if sample else where.removesuffix(", ")
        if self.run.world.main:
            self.run.folder.directory.mkdir(parents=True, exist_ok=True)
            file = self.run.folder.directory / NONFINITE_FILE
            with writing(file), file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(plain({**record, **metrics})) + "\n")
            verb = "is" if len(names) == 1 and UPDATE not in names else "are"
            what = f"{' and '.join(names)} {verb} not finite"
            about_it = f" ({about})" if about else ""
            logger.warning(f"Step {step}: {what}{about_it}. It changes no weight; {row} in a row ({NONFINITE_FILE}).")
        if row > limit:
            raise NonFiniteError(
                f"{row} steps in a row were not finite, the last one step {step} ({', '.join(names)})"
                f"{'; ' if about else ''}{about}. train.max_nonfinite_steps is {limit}. The weights are those before "
                f"the first of these steps, which are in {NONFINITE_FILE}. Try a smaller optimizer.kwargs.lr, smaller "
                "rewards or backend.mixed_precision: no."
            )

    def _bad_parameter(self) -> str | None:
        """Name the first trained parameter with a gradient or weight that is not finite; None without one."""
        backend, names = self.run.backend, []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                own, gradient = backend.own(parameter), backend.gradient(parameter)
                if not _all_finite([own] if gradient is None else [own, gradient]):
                    names.append(name)
                    break
        found = set(self.run.world.gather(names))
        return next((name for name, _ in self.model.named_parameters() if name in found), None)

    def _bad_sample(
        self, parts: Sequence[Experience], losses: Sequence[float], loss: Callable[[Any], Tensor]
    ) -> Row | None:
        """Find the first sample whose own loss or gradient is not finite.

        Returns:
            The micro-batch that it is in, as values of the record; None if no micro-batch of this process is bad.
        """
        bad = [place for place, value in enumerate(losses) if not math.isfinite(value)]
        if self.run.backend.sharded:  # a backward pass for one sample would wait for the other processes
            where = {"micro_batch": bad[0], "rank": self.run.world.rank, "bad_sample": None} if bad else None
            return where and {**where, "samples": _described(parts[bad[0]], self.tokenizer)}
        for place in bad or range(len(parts)):
            samples = _described(parts[place], self.tokenizer)
            for row in range(len(parts[place])):
                self.optimizer.zero_grad(set_to_none=True)
                with isolated_rng(self.run.config.train.seed), torch.enable_grad(), self.run.accelerator.autocast():
                    value = loss(parts[place][row : row + 1])
                    value.backward()
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                if not _all_finite([value.detach().reshape(1), *gradients]):
                    return {"micro_batch": place, "rank": self.run.world.rank, "bad_sample": row, "samples": samples}
            if bad:  # no single sample is bad, as after an overflow in the sum
                return {"micro_batch": place, "rank": self.run.world.rank, "bad_sample": None, "samples": samples}
        return None


@torch.no_grad()
def _largest(tensors: Sequence[Tensor]) -> float:
    """Return a number that no entry of any tensor exceeds; NaN or infinity if one entry is that.

    Counters, such as Adam's number of steps, are left out.
    """
    wanted = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() and tensor.numel()]
    found = bounds(wanted)
    return next((bound for bound in found if not math.isfinite(bound)), max(found, default=0.0))


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all entries of all tensors are finite, but for counters."""
    return math.isfinite(_largest(tensors))


def _described(batch: Experience, tokenizer: Any) -> list[Row]:
    """Describe each sample of a micro-batch: texts by name, and the sum, smallest and largest of its numbers."""
    decode = (lambda ids: "") if tokenizer is None else tokenizer.decode
    return [{name: _short(value) for name, value in row.items()} for row in batch.describe(decode)]


def _short(value: Any) -> Any:
    return f"{value[:LONGEST_TEXT]}..." if isinstance(value, str) and len(value) > LONGEST_TEXT else value


def _words(sample: Mapping[str, Any]) -> str:
    """Return the texts of the bad sample as words: "prompt 'ab', response 'c'"."""
    rows = sample["samples"]
    row = rows[sample["bad_sample"] or 0]
    texts = [f"{name} {value[:80]!r}" for name, value in row.items() if isinstance(value, str)]
    return ", ".join(texts) or f"number {sample['bad_sample']} of its micro-batch"
