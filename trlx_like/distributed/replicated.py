"""The backend "ddp": every process holds all weights, and gradients are summed over processes once a step.

Losses are sums over units and are divided once, by the number of units in the global batch. The model is not wrapped in
DDP: its hooks demand that every process runs backward equally often and through every parameter, which data of
different lengths cannot promise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, distributed as dist, nn
from torch.optim import Optimizer

from trlx_like.distributed.backend import Backend
from trlx_like.optim import divides_gradients

logger = logging.getLogger(__name__)


def clip(parameters: Sequence[nn.Parameter], largest: float | None, norm: Tensor) -> None:
    """Clip gradients by their norm. If that is NaN they stay, or all of them would be NaN and the first one unknown.

    Gradients that are small enough are not touched, where torch multiplies all of them by 1.

    Args:
        parameters: The parameters with the gradients.
        largest: `train.max_grad_norm`.
        norm: The norm of all gradients. []
    """
    if largest is not None and norm + 1e-6 > largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm.nan_to_num())


@contextmanager
def clipped(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], largest: float | None, norm: Tensor
) -> Iterator[None]:
    """Clip gradients by their norm, for a step of an optimizer in a `with` block.

    A kernel that divides gradients while it reads them saves a pass over all of them.

    Args:
        optimizer: The optimizer.
        parameters: What it updates.
        largest: `train.max_grad_norm`.
        norm: The norm of all gradients. []
    """
    if largest is None or not norm + 1e-6 > largest or not divides_gradients(optimizer, norm):
        clip(parameters, largest, norm)
        yield
        return
    kernel: Any = optimizer
    kernel.grad_scale = (norm + 1e-6) / largest
    try:
        yield
    finally:
        del kernel.grad_scale


class ReplicatedBackend(Backend):
    """Hold all weights on every process. The methods are described in `Backend`."""

    parameters: Sequence[nn.Parameter] = ()
    _norm = torch.zeros(())  # of the gradients of the present step

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Bring the model to the device, with the weights of the main process."""
        self.world.place(model)

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the model that require a gradient."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return list(self.parameters)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch. accelerate would look for a package of optimizers at every call."""
        scaler = self.world.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def finish(self) -> Tensor:
        """Sum the gradients over processes, and return their norm []."""
        if self.world.size > 1:
            self._exchange()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            self._norm = torch.zeros(())
            return self._norm
        if (scaler := self.world.accelerator.scaler) is not None:
            scaler.scale(gradients[0].new_zeros(()))  # it has no scale before its first use
        self.world.accelerator.unscale_gradients()
        self._norm = torch.nn.utils.get_total_norm(gradients)
        return self._norm

    def step(self, optimizer: AcceleratedOptimizer, accepted: bool) -> None:
        """Clip the gradients and make a step. In fp16 one whose gradients overflowed is skipped, with a warning."""
        scaler, largest = self.world.accelerator.scaler, self.config.train.max_grad_norm
        if scaler is None or all(p.grad is None for p in self.parameters):
            with clipped(optimizer.optimizer, self.parameters, largest, self._norm) if accepted else nullcontext():
                super().step(optimizer, accepted)
        elif accepted:
            clip(self.parameters, largest, self._norm)
            scale = scaler.get_scale()
            optimizer.step()
            if scaler.get_scale() < scale:  # fused kernels skip by themselves: `step_was_skipped` misses it
                logger.warning(
                    "The gradients overflowed in fp16 at a scale of %g: this step changes nothing, and the scale is %g "
                    "from here on. A few at the start are normal.",
                    scale,
                    scaler.get_scale(),
                )
        else:
            scaler.update()  # or the next gradients could not be unscaled

    def _exchange(self) -> None:
        """Sum gradients over processes; one that lacks a gradient (no data, or unused parameter) adds zero."""
        has = self.world.sum(float(p.grad is not None) for p in self.parameters)
        wanted = [p for p, count in zip(self.parameters, has, strict=True) if count > 0]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in sorted({p.dtype for p in wanted}, key=str):
            gradients = [p.grad for p in wanted if p.dtype == dtype and p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            with self.world.meeting():
                dist.all_reduce(flat)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
