"""The backend "ddp": every process holds all weights, and gradients are summed over processes once a step.

Losses are sums over units and are divided once, by the number of units in the global batch. The model is not wrapped in
DDP: its hooks demand that every process runs backward equally often and through every parameter, which data of
different lengths cannot promise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, distributed as dist, nn

from trlx_like.config import TRLConfig
from trlx_like.distributed.backend import Value
from trlx_like.distributed.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")


def clip(parameters: Sequence[nn.Parameter], largest: float | None, norm: Tensor) -> None:
    """Clip gradients by their norm. If that is NaN they stay, or all of them would be NaN and the first one unknown.

    Args:
        parameters: The parameters with the gradients.
        largest: `train.max_grad_norm`.
        norm: The norm of all gradients. []
    """
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm.nan_to_num(nan=0.0))


class ReplicatedBackend:
    """Hold all weights on every process. The methods are described in `Backend`.

    Args:
        world: The processes of the run.
        config: The complete configuration.
    """

    sharded, reads_files = False, False

    def __init__(self, world: World, config: TRLConfig) -> None:
        self.world = world
        self.max_norm = config.train.max_grad_norm
        self.parameters: list[nn.Parameter] = []

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Bring the model to the device, with the weights of the main process."""
        self.world.place(model)

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the model that require a gradient."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.parameters

    def own(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a weight."""
        return parameter.grad

    def microbatches(self, parts: Sequence[T], counts: Sequence[int]) -> list[tuple[T, float]]:
        """Give every micro-batch the weight 1: processes may have different numbers of them."""
        return [(part, 1.0) for part in parts]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
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
        self.world.accelerator.unscale_gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        clip(self.parameters, self.max_norm, norm)
        return norm

    def step(self, optimizer: AcceleratedOptimizer, accepted: bool) -> None:
        """Make an optimizer step. In fp16 a step whose gradients overflowed is skipped, with a warning."""
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

    def clear(self, optimizer: AcceleratedOptimizer) -> None:
        """Free all gradients."""
        optimizer.zero_grad(set_to_none=True)

    def whole(self) -> AbstractContextManager[None]:
        """Do nothing: weights are whole."""
        return nullcontext()

    sampling = whole

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the module's state dict."""
        yield from module.state_dict().items()

    @torch.no_grad()
    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], value: Value) -> None:
        """Change weights in place."""
        for weight, followed in pairs:
            weight.copy_(value(weight, followed))

    def stateful(self, item: Any) -> Any:
        """Return the item itself."""
        return item

    def parts(self, item: Any) -> Any:
        """Return the state dict, in which no tensor is divided."""
        return item.state_dict()

    def restore(self, item: Any, state: Any) -> None:
        """Load a state dict."""
        item.load_state_dict(state)

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
