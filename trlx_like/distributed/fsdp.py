"""The backend "fsdp": weights, gradients and the optimizer's state are divided over processes, by torch's FSDP2.

The unit is the transformer block: its weights are gathered when it runs, and freed after it. Everything else, such as
embeddings, heads and the same parts of a reference, is one more unit, the root. While a round is sampled and evaluated,
all weights are gathered (`whole`), or with `backend.rollout: layers` the root and the block that runs (`layers.py`), so
that processes may sample differently long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trlx_like.config import TRLConfig
from trlx_like.distributed import torch_fsdp
from trlx_like.distributed.backend import Backend, blocks
from trlx_like.distributed.divided import DividedBackend, divided_over, refuse_replacing, refuse_undividable
from trlx_like.distributed.layers import Layers
from trlx_like.distributed.world import World
from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Part, Unread, flat_range


class ShardedBackend(DividedBackend):
    """Divide all weights over processes. The methods are described in `Backend`.

    Raises:
        ConfigError: If "hybrid" does not fit the processes.
    """

    reads_files = True

    def __init__(self, world: World, config: TRLConfig) -> None:
        super().__init__(world, config)
        self.mesh = _mesh(world, config)
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.model: nn.Module | None = None
        self._units: list[FSDPModule] = []
        self._before: torch_fsdp.Attributes = {}
        self._divided_now = False  # in `sampling`, with all weights but those that run

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Divide the model, and the modules beside it as part of it, block by block."""
        refuse_replacing(self.config, others)
        self._before = {part: set(vars(part)) for module in (model, *others) for part in module.modules()}
        names = [f"_beside_{number}" for number in range(len(others))]
        for name, other in zip(names, others, strict=True):
            model.add_module(name, other)
        again = self.config.backend.shard != "gradients"
        for block in blocks(model):
            block.register_forward_hook(_forget_casts)
            self._divide(block, again)
        self._divide(model, False)
        self._check_reading()
        self._units = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._units:
            # Losses are divided by the units of the global batch, so gradients are sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        torch_fsdp.start(model)
        for name in names:
            delattr(model, name)
        self.model = model

    def _divide(self, module: nn.Module, again: bool) -> None:
        """Make a module a unit, and read this process's part of its weights that are still in files."""
        unread = [
            (part, name, weight)
            for part in module.modules()
            for name, weight in part._parameters.items()
            if isinstance(weight, Unread)
        ]
        for _, _, weight in unread:  # memory that nothing is written to, of which this process's part remains
            weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=self.world.accelerator.device)
        self._place(module)
        fully_shard(module, mesh=self.mesh, reshard_after_forward=again, **self._policies())
        for weight, divided in {weight: getattr(part, name) for part, name, weight in unread}.items():
            own = self._updated(divided)
            try:
                own.values.copy_(own.like(weight.saved))
            except (ConfigError, OSError, SafetensorError) as error:  # `prepare` raises it, as the others wait there
                self._unreadable = error

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
        tensors = [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor | Unread)]
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        self.world.same_weights(tensors)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight or gradient."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _part(self, weight: Tensor) -> Part | None:
        if not isinstance(weight, DTensor):
            return None
        shape, writes = tuple(weight.shape), self.mesh.ndim == 1 or self.mesh.get_local_rank(0) == 0
        begin, _ = flat_range(shape, dist.get_rank(self.group), dist.get_world_size(self.group))
        return Part(self.own(weight.detach()).view(-1), shape, begin, writes)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return None if parameter.grad is None else self.own(parameter.grad)

    def _share(self, shape: Sequence[int], ranks: int) -> int:
        return flat_range(shape, 0, ranks)[1]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch, summed over processes."""
        assert self.model is not None
        torch_fsdp.begin_backward(self.model, loss)
        with self.world.meeting():
            self.world.accelerator.backward(loss)

    def whole(self) -> AbstractContextManager[None]:
        """Gather all weights, and make the modules plain ones, for a `with` block."""
        if self._divided_now:
            raise RuntimeError("backend.rollout (layers): weights are divided while a round is sampled or evaluated.")
        return self._plain(self._units)

    @contextmanager
    def gathered_to_sample(self) -> Iterator[None]:
        """Gather what `backend.rollout` says, and make the modules plain ones, for a `with` block."""
        if self.config.backend.rollout == "whole" or self._whole or not self._units:
            with self._plain(self._units):
                yield
            return
        self._divided_now = True
        root, *blocks = self._units
        try:
            with self._plain([root]), Layers(self.world, blocks).gathered_to_run():
                yield
        finally:
            self._divided_now = False

    @contextmanager
    def _plain(self, gathered: Sequence[FSDPModule]) -> Iterator[None]:
        if self._whole or not self._units:
            yield
            return
        with self.world.meeting():
            for unit in gathered:
                torch_fsdp.gather(unit)
        self._whole = True
        try:
            with torch_fsdp.plain(self._units, self._before):
                yield
        finally:
            self._whole = False
            for unit in gathered:
                torch_fsdp.divide(unit)


def _forget_casts(block: nn.Module, *_: Any) -> None:
    """Free the copies in 16 bits that autocast keeps of a divided block's weights until the forward pass ends."""
    if isinstance(block, FSDPModule):
        torch.clear_autocast_cache()


def make_sharded(world: World, config: TRLConfig) -> Backend:
    """Make the backend "fsdp". One process alone holds all weights, as with "ddp".

    Raises:
        ConfigError: For options that cannot be followed when weights are divided, on one process too.
    """
    refuse_undividable(config)
    return divided_over(world, config, ShardedBackend)


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
