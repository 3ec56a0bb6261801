"""The backend "ddp": every process holds all weights, and gradients are summed over processes once a step.

Losses are sums over units and are divided once, by the number of units in the global batch. The model is not wrapped in
DDP: its hooks demand that every process runs backward equally often and through every parameter, which data of
different lengths cannot promise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, distributed as dist, nn

from trlx_like.distributed.backend import Backend
from trlx_like.distributed.embeddings import add_by_rows

logger = logging.getLogger(__name__)


ROW = 1024
"""Of how many numbers `total_norm` takes the norm at once."""
LONG = 2**17
"""The least size of a tensor that it takes row by row. In smaller ones torch's norm is wrong by less than 1e-6."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all numbers of some tensors on one device together. []

    On CPUs torch adds up the squares of a tensor one by one in float32, where small ones are lost beside the sum: the
    norm of 2 million normal numbers is 3e-5 too small, of 38 million (the embeddings of GPT-2) 3e-3. The norm of the
    norms of short rows takes as long, and is right to 1e-6.
    """
    parts = list[Tensor]()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() >= LONG:
            flat = tensor.reshape(-1)
            end = len(flat) - len(flat) % ROW
            parts.append(torch.linalg.vector_norm(flat[:end].view(-1, ROW), dim=1))
            tensor = flat[end:]
        parts.append(tensor)
    if not parts:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    return norm


def clip(gradients: list[Tensor], largest: float | None, norm: Tensor) -> None:
    """Clip gradients by their norm. If that is NaN they stay, or all of them would be NaN and the first one unknown.

    As `torch.nn.utils.clip_grads_with_norm_`, but gradients that are small enough are not touched, where torch
    multiplies all of them by 1.

    Args:
        gradients: The gradients, all on one device.
        largest: `train.max_grad_norm`.
        norm: The norm of all gradients. []
    """
    if largest is not None and gradients and norm + 1e-6 > largest:
        torch._foreach_mul_(gradients, (largest / (norm.nan_to_num() + 1e-6)).to(gradients[0].device))


class ReplicatedBackend(Backend):
    """Hold all weights on every process. The methods are described in `Backend`."""

    parameters: Sequence[nn.Parameter] = ()

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Bring the model to the device, with the weights of the main process."""
        self.world.place(model)
        add_by_rows(model)

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the model that require a gradient."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return list(self.parameters)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch. accelerate would look for a package of optimizers each time."""
        scaler = self.world.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def finish(self) -> Tensor:
        """Sum the gradients over processes, clip them, and return their norm [] before clipping."""
        if self.world.size > 1:
            self._exchange()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        if (scaler := self.world.accelerator.scaler) is not None:
            scaler.scale(gradients[0].new_zeros(()))  # it has no scale before its first use
        self.world.accelerator.unscale_gradients()
        norm = total_norm(gradients)
        clip(gradients, self.config.train.max_grad_norm, norm)
        return norm

    def step(self, optimizer: AcceleratedOptimizer, accepted: bool) -> None:
        """Make an optimizer step. In fp16 a step whose gradients overflowed is skipped, with a warning."""
        scaler = self.world.accelerator.scaler
        if scaler is None or all(p.grad is None for p in self.parameters):
            # Inside accelerate's wrapper, whose `step` would look for that package each time as well.
            super().step(getattr(optimizer, "optimizer", optimizer), accepted)
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

    def clear(self, optimizer: AcceleratedOptimizer) -> None:
        """Free all gradients. accelerate's wrapper would look at the signature of the optimizer's method each time."""
        for parameter in self.parameters:
            parameter.grad = None

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
