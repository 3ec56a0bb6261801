"""Gradients of a global batch, whatever the number of micro-batches and processes that it is split into.

Losses are sums over units and are divided once, by the number of units in the global batch. Gradients are then summed
over processes in one exchange a step. The model is not wrapped in DDP: its hooks demand that every process runs
backward equally often and through every parameter, which data of different lengths cannot promise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, distributed as dist, nn

from trlx_like.distributed.world import World

logger = logging.getLogger(__name__)


class GradientAccumulator:
    """Accumulate the gradients of micro-batches, sum them over processes, clip them, and make the step.

    Args:
        world: The processes of the run.
        parameters: The trained parameters.
        max_norm: Gradients are clipped to this norm; None does not clip.
    """

    def __init__(self, world: World, parameters: Sequence[nn.Parameter], max_norm: float | None) -> None:
        self.world = world
        self.parameters = parameters
        self.max_norm = max_norm

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: The sum over the micro-batch, divided by the units of the global batch. []
        """
        self.world.accelerator.backward(loss)

    def finish(self) -> Tensor:
        """Sum the gradients over processes, clip them, and return their norm [] before clipping."""
        if self.world.size > 1:
            self._exchange()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        if (scaler := self.world.accelerator.scaler) is not None:
            scaler.scale(gradients[0].new_zeros(()))  # it has no scale before its first use
        if self.max_norm is None:
            self.world.accelerator.unscale_gradients()
            return torch.nn.utils.get_total_norm(gradients)
        norm: Tensor = self.world.accelerator.clip_grad_norm_(self.parameters, self.max_norm)
        return norm

    def step(self, optimizer: AcceleratedOptimizer, accepted: bool) -> None:
        """Make an optimiser step on the gradients that `finish` left.

        In fp16 a step whose gradients overflowed is skipped, with a warning.

        Args:
            optimizer: The optimiser.
            accepted: False drops the gradients without a step.
        """
        scaler = self.world.accelerator.scaler
        if scaler is None or all(p.grad is None for p in self.parameters):
            if accepted:
                optimizer.step()
        elif accepted:
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
