"""What backends share that divide weights over processes: how a process steps, saves and restores what it holds.

The optimizer works on flat tensors, the part that this process holds of each weight. So it must treat every number
alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed as dist, nn

from trlx_like.config import TRLConfig
from trlx_like.config.problems import shown
from trlx_like.distributed.backend import Backend, Value
from trlx_like.distributed.divided_state import DividedState, divided, undivided
from trlx_like.distributed.replicated import ReplicatedBackend, clip, total_norm
from trlx_like.distributed.world import World
from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Part

T = TypeVar("T")

ELEMENTWISE = (
    *("adam", "adamw", "adamw_torch", "adamw_torch_fused", "sgd", "adadelta", "adagrad", "adamax", "asgd", "nadam"),
    *("radam", "rmsprop", "rprop"),
)
"""Optimizers that treat every number of a weight alone."""


class DividedBackend(Backend):
    """Divide weights over at least two processes. The methods are described in `Backend`.

    A subclass divides them, and fills `backward`, `whole`, `gradient`, `_part` and `own`.
    """

    sharded = True

    def __init__(self, world: World, config: TRLConfig) -> None:
        super().__init__(world, config)
        self.group: dist.ProcessGroup | None = None  # None: all processes
        self._parts: dict[Tensor, Part] = {}  # of each trained weight what this process updates, in the model's order
        self._own: list[nn.Parameter] = []  # the values of these parts, with gradients
        self._whole = False
        self._unreadable: Exception | None = None  # why this process could not read a weight from its file

    def _check_reading(self) -> None:
        """Raise ConfigError on all processes if one could not read a weight, which the others have waited for."""
        if any(self.world.gather([self._unreadable is not None])):
            raise self._unreadable or ConfigError("model.model_path: another process cannot read it, and says why.")

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return this process's part of each trained weight, as flat tensors."""
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parts = {parameter: self._updated(parameter) for parameter in wanted}
        self._own = [nn.Parameter(part.values) for part in self._parts.values()]
        return self._own

    def _seen(self, weight: Tensor) -> Tensor:
        """Return the memory from which modules get this process's numbers of a weight."""
        return self.own(weight)

    @abstractmethod
    def _part(self, weight: Tensor) -> Part | None:
        """Return this process's part of a weight, with its memory; None for a weight that every process holds."""

    def _updated(self, parameter: Tensor) -> Part:
        """Return the part of a trained weight that the optimizer of this process updates, with its memory."""
        part = self._part(parameter)
        assert part is not None, "a trained weight is not divided"
        return part

    def microbatches(self, parts: Sequence[T], counts: Sequence[int]) -> list[tuple[T, float]]:
        """Add micro-batches of weight 0, as many as the process with the most of them has more.

        A process without data gets one of another process.
        """
        given = list(parts)
        if max(counts) and not min(counts):
            giver = next(rank for rank, count in enumerate(counts) if count)
            sent = self.world.gather([given[0] if self.world.rank == giver else None])
            given = given or [part for part in sent if part is not None]
        missing = max(counts) - len(parts)
        return [*((part, 1.0) for part in parts), *((part, 0.0) for part in given[:1] * missing)]

    def finish(self) -> Tensor:
        """Clip the gradients, and return their norm [] before clipping."""
        for parameter, own in zip(self._parts, self._own, strict=True):
            gradient = self.gradient(parameter)
            own.grad = None if gradient is None else gradient.reshape(-1)
        gradients = [own.grad for own in self._own if own.grad is not None]
        square = total_norm(gradients).square().to(self.world.accelerator.device)
        with self.world.meeting():
            dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        clip(gradients, self.config.train.max_grad_norm, norm)
        return norm

    def clear(self, optimizer: Any) -> None:
        """Free all gradients."""
        super().clear(optimizer)
        for parameter in self._parts:
            parameter.grad = None

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the module's state dict, with one tensor gathered at a time."""
        for name, value in self.parts(module).items():
            yield name, self.gathered(value) if isinstance(value, Part) else value

    @torch.no_grad()
    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], value: Value) -> None:
        """Change this process's part of weights in place."""
        if self._whole:
            raise RuntimeError("Weights cannot be changed while they are gathered: the change would be lost.")
        for weight, followed in pairs:
            seen = self._seen(weight)
            seen.copy_(value(seen, self._seen(followed)))

    def stateful(self, item: Any) -> DividedState:
        """Wrap a module or optimizer, so that each process writes and reads its own part."""
        return DividedState(self, item)

    def parts(self, item: Any) -> Any:
        """Return the state dict of a module or optimizer with `Part`s in place of divided tensors."""
        if not isinstance(item, nn.Module):
            return divided(item.state_dict(), self._updated_by(item))
        state = item.state_dict(keep_vars=True)
        return type(state)((name, self._part(value) or value.detach()) for name, value in state.items())

    @torch.no_grad()
    def restore(self, item: Any, state: Any) -> None:
        """Load a state dict of whole tensors, `Part`s or saved tensors."""
        if not isinstance(item, nn.Module):
            item.load_state_dict(undivided(state, self._updated_by(item)))
            return
        present = item.state_dict(keep_vars=True)
        if set(present) != set(state):
            different = sorted(set(present) ^ set(state))
            raise ValueError(f"it has other weights: {', '.join(different[:3])}, ... ({len(different)})")
        for name, value in present.items():
            part = self._part(value) or Part(value.detach().flatten(), tuple(value.shape), 0)
            if tuple(state[name].shape) != part.shape:
                raise ValueError(f"{name} has the shape {list(state[name].shape)}, and {list(part.shape)} is wanted")
            own = self.own(value)  # a part may be a copy
            own.copy_(part.like(state[name]).view(own.shape))

    def _updated_by(self, optimizer: Any) -> list[Part]:
        """Return the parts that an optimizer updates, in the order of its groups, by which its state is numbered."""
        parts = dict(zip(self._own, self._parts.values(), strict=True))
        return [parts[parameter] for group in optimizer.param_groups for parameter in group["params"]]

    def gathered(self, part: Part) -> Tensor:
        """Put a tensor together from the parts of all processes. The first ones hold equally many numbers."""
        ranks = dist.get_world_size(self.group)
        size = self._share(part.shape, ranks)
        own = torch.zeros(size, dtype=part.values.dtype, device=self.world.accelerator.device)
        own[: part.values.numel()] = part.values
        every = own.new_empty(ranks, size)
        with self.world.meeting():
            dist.all_gather(list(every), own, group=self.group)
        return every.flatten()[: math.prod(part.shape)].view(part.shape)

    @abstractmethod
    def _share(self, shape: Sequence[int], ranks: int) -> int:
        """Return how many numbers of a divided weight the first process holds."""


def refuse_undividable(config: TRLConfig) -> None:
    """Raise ConfigError for options that cannot be followed when weights are divided."""
    kind = f"backend.kind ({config.backend.kind})"
    if config.backend.mixed_precision == "fp16":
        raise ConfigError(f"{kind}: backend.mixed_precision is fp16, and gradients would not be scaled; use bf16.")
    if config.model.quantization is not None:
        raise ConfigError(
            f"{kind}: model.quantization ({config.model.quantization}) packs weights in a form that has no rows; "
            "leave it out, or use ddp."
        )
    if str(config.optimizer.name).lower() not in ELEMENTWISE:
        raise ConfigError(
            f"{kind}: optimizer.name ({shown(config.optimizer.name)}) must be the name of an optimizer that treats "
            f"every number of a weight alone, as processes hold parts of it: one of {', '.join(ELEMENTWISE)}."
        )


def divided_over(world: World, config: TRLConfig, kind: type[DividedBackend]) -> Backend:
    """Make a backend that divides weights. One process alone holds all of them, as with "ddp"."""
    if world.size > 1:
        return kind(world, config)
    if config.backend.offload != "none":
        raise ConfigError(f"backend.offload ({config.backend.offload}) needs several processes, and there is one.")
    return ReplicatedBackend(world, config)


def refuse_replacing(config: TRLConfig, others: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a reference that takes the places of weights which are divided."""
    if any(getattr(other, "outside_layers", False) for other in others):
        raise ConfigError(
            f"backend.kind ({config.backend.kind}): a reference that takes the places of all trained weights needs an "
            "adapter (model.peft_config), or backend.kind: ddp."
        )
