"""The backend "fsdp": weights, gradients and the optimizer's state are divided over processes, by torch's FSDP2.

The unit is the transformer block: its weights are gathered when it runs, and freed after it. Everything else, such as
embeddings, heads and the same parts of a reference, is one more unit, the root. While a round is sampled and evaluated,
all weights are gathered (`whole`), so that processes may sample differently long.

The optimizer works on plain tensors, the part that this process holds of each weight. So it must treat every number
alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trlx_like.config import TRLConfig
from trlx_like.distributed import torch_fsdp
from trlx_like.distributed.backend import Backend, Value, blocks
from trlx_like.distributed.divided_state import DividedState, divided, undivided
from trlx_like.distributed.replicated import ReplicatedBackend
from trlx_like.distributed.world import World
from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Part, flat_range

T = TypeVar("T")

ELEMENTWISE = (
    *("adam", "adamw", "adamw_torch", "adamw_torch_fused", "sgd", "adadelta", "adagrad", "adamax", "asgd", "nadam"),
    *("radam", "rmsprop", "rprop"),
)
"""Optimizers that treat every number of a weight alone."""


class ShardedBackend:
    """Divide all weights over processes. The methods are described in `Backend`.

    Args:
        world: The processes of the run, at least two.
        config: The complete configuration.

    Raises:
        ConfigError: If "hybrid" does not fit the processes.
    """

    sharded = True

    def __init__(self, world: World, config: TRLConfig) -> None:
        self.world, self.config = world, config
        self.mesh = _mesh(world, config)
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.model: nn.Module | None = None
        self._units: list[FSDPModule] = []
        self._before: torch_fsdp.Attributes = {}
        self._trained: list[tuple[nn.Parameter, nn.Parameter]] = []  # each with the part that this process updates
        self._whole = False

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Divide the model, and the modules beside it as part of it, block by block."""
        for other in others:
            if getattr(other, "outside_layers", False):
                raise ConfigError(
                    f"backend.kind ({self.config.backend.kind}): a reference that takes the places of all trained "
                    "weights needs an adapter (model.peft_config), or backend.kind: ddp."
                )
        self._before = torch_fsdp.attributes([part for module in (model, *others) for part in module.modules()])
        names = [f"_beside_{number}" for number in range(len(others))]
        for name, other in zip(names, others, strict=True):
            model.add_module(name, other)
        again = self.config.backend.shard != "gradients"
        for block in blocks(model):
            self._place(block)
            fully_shard(block, mesh=self.mesh, reshard_after_forward=again, **self._policies())
        self._place(model)
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False, **self._policies())
        self._units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._units:
            # Losses are divided by the units of the global batch, so gradients are sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        torch_fsdp.start(model)
        for name in names:
            delattr(model, name)
        self.model = model

    def _policies(self) -> dict[str, Any]:
        """Return the number format of sums of gradients, and where weights are kept."""
        backend = self.config.backend
        reduced = torch.bfloat16 if backend.reduce_dtype == "bfloat16" else None
        pinned = self.world.accelerator.device.type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pinned) if backend.offload == "all" else OffloadPolicy()
        return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduced), "offload_policy": offload}

    def _place(self, module: nn.Module) -> None:
        """Bring what is not divided yet to the device, with the values of the main process."""
        device = self.world.accelerator.device
        tensors = [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor)]
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        self.world.same_weights(tensors)

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return this process's part of each trained weight."""
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = [(parameter, nn.Parameter(self.own(parameter.detach()))) for parameter in wanted]
        return [own for _, own in self._trained]

    def own(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight or gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

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

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch, summed over processes."""
        assert self.model is not None
        torch_fsdp.begin_backward(self.model, loss)
        with self.world.meeting():
            self.world.accelerator.backward(loss)

    def finish(self) -> Tensor:
        """Clip the gradients, and return their norm [] before clipping."""
        for parameter, own in self._trained:
            own.grad = None if parameter.grad is None else self.own(parameter.grad)
        gradients = [own.grad for _, own in self._trained if own.grad is not None]
        device = self.world.accelerator.device
        square = (
            torch.nn.utils.get_total_norm(gradients).square().to(device)
            if gradients
            else torch.zeros((), device=device)
        )
        with self.world.meeting():
            dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        if self.config.train.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                [own for _, own in self._trained], self.config.train.max_grad_norm, norm
            )
        return norm

    def step(self, optimizer: Any, accepted: bool) -> None:
        """Make an optimizer step on this process's part of the weights."""
        if accepted:
            optimizer.step()

    def clear(self, optimizer: Any) -> None:
        """Free all gradients."""
        optimizer.zero_grad(set_to_none=True)
        for parameter, _ in self._trained:
            parameter.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights, and make the modules plain ones, for a `with` block."""
        if self._whole or not self._units:
            yield
            return
        with self.world.meeting():
            for unit in self._units:
                unit.unshard()
        self._whole = True
        try:
            with torch_fsdp.plain(self._units, self._before):
                yield
        finally:
            self._whole = False
            for unit in self._units:
                unit.reshard()

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
            own = self.own(weight)
            own.copy_(value(own, self.own(followed)))

    def stateful(self, item: Any) -> DividedState:
        """Wrap a module or optimizer, so that each process writes and reads its own part."""
        return DividedState(self, item)

    def parts(self, item: Any) -> Any:
        """Return the state dict of a module or optimizer with `Part`s in place of divided tensors."""
        state = item.state_dict()
        if isinstance(item, nn.Module):
            return type(state)((name, self._part(value, value)) for name, value in state.items())
        return divided(state, [(parameter, own) for parameter, own in self._trained], self._part)

    def restore(self, item: Any, state: Any) -> None:
        """Load a state dict of whole tensors or `Part`s."""
        if not isinstance(item, nn.Module):
            item.load_state_dict(undivided(state, [parameter for parameter, _ in self._trained], self.own_range))
            return
        present = item.state_dict()
        if set(present) != set(state):
            different = sorted(set(present) ^ set(state))
            raise ValueError(f"it has other weights: {', '.join(different[:3])}, ... ({len(different)})")
        with torch.no_grad():
            for name, value in present.items():
                given, whole = state[name], tuple(value.shape)
                if tuple(given.shape) != whole:
                    raise ValueError(f"{name} has the shape {list(given.shape)}, and {list(whole)} is wanted")
                own = self.own(value)
                if isinstance(given, Part):
                    given = given.values
                elif isinstance(value, DTensor):
                    given = given.flatten()[slice(*self.own_range(whole))]
                own.copy_(given.view(own.shape))

    def gathered(self, part: Part) -> Tensor:
        """Put a tensor together from the parts of all processes."""
        rows = math.ceil(part.shape[0] / self.ranks) if part.shape else 1
        size = rows * math.prod(part.shape[1:])
        own = torch.zeros(size, dtype=part.values.dtype, device=self.world.accelerator.device)
        own[: part.values.numel()] = part.values
        every = own.new_empty(self.ranks, size)
        with self.world.meeting():
            dist.all_gather(list(every), own, group=self.group)
        return every.flatten()[: math.prod(part.shape)].view(part.shape)

    def own_range(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the range of this process in a flattened tensor."""
        return flat_range(shape, self.rank, self.ranks)

    def _part(self, value: Any, like: Any) -> Any:
        """Return a `Part` for a tensor that is divided, or is laid out like the part of one; else the value."""
        if not isinstance(like, DTensor):
            return value
        writes = self.mesh.ndim == 1 or self.mesh.get_local_rank(0) == 0
        shape = tuple(like.shape)
        return Part(self.own(value).detach().flatten(), shape, self.own_range(shape)[0], writes)


def make_sharded(world: World, config: TRLConfig) -> Backend:
    """Make the backend "fsdp". One process alone holds all weights, as with "ddp".

    Raises:
        ConfigError: For options that cannot be followed when weights are divided, on one process too.
    """
    _refuse(config)
    if world.size > 1:
        return ShardedBackend(world, config)
    if config.backend.offload != "none":
        raise ConfigError(f"backend.offload ({config.backend.offload}) needs several processes, and there is one.")
    return ReplicatedBackend(world, config)


def _refuse(config: TRLConfig) -> None:
    """Raise ConfigError for options that cannot be followed when weights are divided."""
    kind = f"backend.kind ({config.backend.kind})"
    if config.backend.mixed_precision == "fp16":
        raise ConfigError(f"{kind}: backend.mixed_precision is fp16, and gradients would not be scaled; use bf16.")
    if config.model.quantization is not None:
        raise ConfigError(
            f"{kind}: model.quantization ({config.model.quantization}) packs weights in a form that has no rows; "
            "leave it out, or use ddp."
        )
    if config.optimizer.name.lower() not in ELEMENTWISE:
        raise ConfigError(
            f"{kind}: optimizer.name ({config.optimizer.name}) must be an optimizer that treats every number of a "
            f"weight alone, as processes hold parts of it: one of {', '.join(ELEMENTWISE)}."
        )


def _mesh(world: World, config: TRLConfig) -> DeviceMesh:
    """Arrange the processes: in a row, or for "hybrid" in a row for each machine."""
    device = world.accelerator.device.type
    if config.backend.shard != "hybrid":
        return init_device_mesh(device, (world.size,))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.size % local or local in (1, world.size):
        raise ConfigError(
            f"backend.shard (hybrid) divides weights within a machine, and needs several machines with as many "
            f"processes each: there are {world.size} processes, {local} of them on this machine (LOCAL_WORLD_SIZE). "
            "Use full."
        )
    return init_device_mesh(device, (world.size // local, local), mesh_dim_names=("machines", "processes"))
