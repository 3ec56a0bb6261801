"""The backend "deepspeed": optimizer states, gradients and weights are divided over processes, by DeepSpeed's ZeRO.

`backend.shard` names the stage. With ZeRO-1 and 2 every process holds all weights, and updates its part of them. With
ZeRO-3 weights and references are divided too; while a round is sampled and evaluated they are gathered (`whole`).

Checkpoints are our own: DeepSpeed's are pickles, which only the same number of processes can read. Losses are ours as
well, so that weights stay in float32, and `backend.mixed_precision` is the number format of the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from trlx_like.config import TRLConfig
from trlx_like.distributed import zero_engine
from trlx_like.distributed.backend import Backend, Value
from trlx_like.distributed.divided import DividedBackend, divided_over, refuse_replacing, refuse_undividable
from trlx_like.distributed.world import World
from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Part, Unread, row_range
from trlx_like.imports import install_hint

T = TypeVar("T")

STAGES = {"optimizer": 1, "gradients": 2, "full": 3}
"""The stage of ZeRO for each value of `backend.shard`."""
BUCKET = 500_000_000
"""Numbers of gradients that are summed at once at most: what DeepSpeed takes for `reduce_bucket_size` by itself."""
OURS = {
    **dict.fromkeys(("fp16", "bf16", "amp", "torch_autocast"), "backend.mixed_precision"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "train.batch_size"),
    "gradient_accumulation_steps": "train.minibatch_size",
    "gradient_clipping": "train.max_grad_norm",
    "communication_data_type": "backend.reduce_dtype",
    "optimizer": "optimizer.name and optimizer.kwargs",
    "scheduler": "scheduler.name and scheduler.kwargs",
    "activation_checkpointing": "backend.gradient_checkpointing",
    "zero_optimization.stage": "backend.shard",
    "zero_optimization.offload_optimizer.device": "backend.offload",
    "zero_optimization.offload_param.device": "backend.offload",
}
"""Options of DeepSpeed that follow from our own, which are named."""
FOREIGN = {
    "zero_hpz_partition_size": "weights are divided over all processes",
    "zero_quantized_weights": "gathered weights would not be the stored ones",
    "zero_quantized_nontrainable_weights": "gathered weights would not be the stored ones",
    "zero_quantized_gradients": "gradients would be rounded",
    "mics_shard_size": "weights are divided over all processes",
    "zenflow": "the optimizer is not DeepSpeed's",
    "offload_optimizer.ratio": "the optimizer is not DeepSpeed's",
}
"""Options of `zero_optimization` that are refused, and why."""


class ZeroBackend(DividedBackend):
    """Divide by ZeRO. The methods are described in `Backend`.

    Args:
        world: The processes of the run, at least two.
        config: The complete configuration.
    """

    def __init__(self, world: World, config: TRLConfig) -> None:
        super().__init__(world, config)
        self._engine: Any = None
        self._full = self.reads_files = config.backend.shard == "full"
        self._weights: list[nn.Parameter] = []  # all that are divided
        self._added: zero_engine.Hooks = {}
        self._left = 0  # micro-batches of this step that have not been run
        self._used: set[Tensor] = set()  # weights with a gradient in this step

    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Divide the model, and with ZeRO-3 the modules beside it as part of it."""
        refuse_replacing(self.config, others)
        device = self.world.accelerator.device
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            raise ConfigError(
                f"backend.kind ({self.config.backend.kind}) needs all weights in float32: leave model.dtype "
                f"({self.config.model.dtype}) out and set backend.mixed_precision, or use backend.kind: fsdp."
            )
        names = [f"_beside_{number}" for number in range(len(others) * self._full)]
        for name, other in zip(names, others, strict=False):
            model.add_module(name, other)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self.world.same_weights(list(model.buffers()))
        before = zero_engine.hooks(list(model.modules()))
        self._weights = list(model.parameters()) if self._full else []
        options = _options(self.world, self.config, wanted)
        try:
            self._divide_unread(options)
            self._engine = zero_engine.start(model, wanted, options, device)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"]))
            raise ConfigError(f"backend.deepspeed_config.zero_optimization.{where}: {wrong['msg']}.") from error
        if self._full and any(hasattr(other, "outside_layers") for other in others):
            zero_engine.forget_order(self._engine)
        after = zero_engine.hooks(list(before))
        self._added = {part: (after[part][0] - first, after[part][1] - last) for part, (first, last) in before.items()}
        for name in names:
            delattr(model, name)
        for parameter in wanted:
            parameter.register_post_accumulate_grad_hook(self._used.add)

    def _divide_unread(self, options: dict[str, Any]) -> None:
        """Divide the weights that are still in files, each before the next one is read by the main process."""
        unread = [weight for weight in self._weights if isinstance(weight, Unread)]
        if unread:
            zero_engine.divide(unread, self._read, options, self.world.accelerator.device)
            self._check_reading()

    def _read(self, weight: nn.Parameter) -> Tensor:
        """Return the whole weight, or memory for it, to which DeepSpeed sends the numbers of the main process."""
        assert isinstance(weight, Unread)
        if self.world.rank == 0:
            try:
                return weight.saved.read(0, weight.numel()).view(weight.shape).to(weight.dtype)
            except (ConfigError, OSError, SafetensorError) as error:  # raised later, as the others wait for the numbers
                self._unreadable = error
        return torch.empty(weight.shape, dtype=weight.dtype)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight."""
        part = self._part(tensor)
        return tensor if part is None else part.values

    def _seen(self, weight: Tensor) -> Tensor:
        found = zero_engine.stored(weight)
        return weight if found is None else found[0]

    def _part(self, weight: Tensor) -> Part | None:
        """Return the part that is updated, or of a frozen weight the one that is stored."""
        updated = self._parts.get(weight)
        found = zero_engine.stored(weight) if updated is None else None
        return Part(found[0], zero_engine.shape(weight), found[1]) if found is not None else updated

    def _updated(self, parameter: Tensor) -> Part:
        values, begin = zero_engine.updated(self._engine, parameter)
        return Part(values, zero_engine.shape(parameter), begin)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return zero_engine.gradient(self._engine, parameter) if parameter in self._used else None

    def _share(self, shape: Sequence[int], ranks: int) -> int:
        return row_range(math.prod(shape), 0, ranks)[1]

    def microbatches(self, parts: Sequence[T], counts: Sequence[int]) -> list[tuple[T, float]]:
        """Add micro-batches of weight 0, so that every process has equally many."""
        self._left = max(counts)
        return super().microbatches(parts, counts)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch, summed over processes."""
        self._left -= 1
        with self.world.meeting():  # DeepSpeed takes the mean over processes
            zero_engine.backward(self._engine, loss * self.world.size, last=self._left <= 0)

    def clear(self, optimizer: Any) -> None:
        """Free all gradients, and give all processes the weights that were updated."""
        super().clear(optimizer)
        if self._used:
            with self.world.meeting():
                zero_engine.hand_on(self._engine, self._used)
        self._used.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights, and make the modules plain ones, for a `with` block."""
        if self._whole or not self._weights:
            yield
            return
        with zero_engine.plain(self._weights, self._added):
            self._whole = True
            try:
                yield
            finally:
                self._whole = False

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the module's state dict, with one tensor gathered at a time."""
        return super().weights(module) if self._full else iter(module.state_dict().items())

    @torch.no_grad()
    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], value: Value) -> None:
        """Change this process's part of weights in place."""
        listed = list(pairs)
        super().write(listed, value)
        zero_engine.release([weight for weight, _ in listed])
        for weight in self._parts.keys() & {weight for weight, _ in listed}:
            part = self._parts[weight]
            part.values.copy_(self._seen(weight) if self._full else part.like(weight.detach()))

    def restore(self, item: Any, state: Any) -> None:
        """Load a state dict of whole tensors, `Part`s or saved tensors."""
        super().restore(item, state)
        if isinstance(item, nn.Module):
            zero_engine.release(list(item.parameters()))
            with self.world.meeting():
                zero_engine.show(self._engine, self._parts)


def make_zero(world: World, config: TRLConfig) -> Backend:
    """Make the backend "deepspeed". One process alone holds all weights, as with "ddp".

    Raises:
        ConfigError: For options that cannot be followed under ZeRO, on one process too, and without DeepSpeed.
    """
    refuse_undividable(config)
    backend = config.backend
    if backend.offload == "all" and backend.shard != "full":
        raise ConfigError(
            f"backend.offload (all) needs backend.shard: full, as every process uses all weights with "
            f"{backend.shard}; set backend.offload: optimizer."
        )
    for option in _names(backend.deepspeed_config):
        if option in OURS:
            raise ConfigError(f"backend.deepspeed_config.{option} follows from {OURS[option]}: set that option.")
        first, _, rest = option.partition(".")
        if first != "zero_optimization" or rest in FOREIGN:
            why = FOREIGN.get(rest, "only zero_optimization is passed on to DeepSpeed")
            raise ConfigError(f"backend.deepspeed_config.{option} cannot be followed: {why}. Leave it out.")
    if find_spec("deepspeed") is None:
        raise ConfigError(f"backend.kind: deepspeed needs DeepSpeed: {install_hint('deepspeed')}.")
    return divided_over(world, config, ZeroBackend)


def _names(options: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yield the dotted name of each option."""
    for name, value in options.items():
        yield f"{place}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{place}{name}.")


def bucket_size(config: TRLConfig, trained: Iterable[Tensor]) -> int:
    """Return how many numbers of gradients are summed at once. DeepSpeed allocates memory for as many.

    Args:
        config: The complete configuration.
        trained: The weights that are trained; there is no use for more numbers than these have.
    """
    given: int | None = config.backend.deepspeed_config.get("zero_optimization", {}).get("reduce_bucket_size")
    return min(BUCKET, sum(weight.numel() for weight in trained)) if given is None else int(given)


def _options(world: World, config: TRLConfig, trained: Sequence[Tensor]) -> dict[str, Any]:
    """Return the configuration of DeepSpeed."""
    backend, pinned = config.backend, world.accelerator.device.type != "cpu"
    given = dict(backend.deepspeed_config.get("zero_optimization", {}))
    given["reduce_bucket_size"] = bucket_size(config, trained)
    moved = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    for name in moved[backend.offload]:
        given[name] = {"device": "cpu", "pin_memory": pinned, **given.get(name, {})}
    return {
        "train_micro_batch_size_per_gpu": 1,  # it counts nothing: losses are divided by the units of the global batch
        "zero_optimization": {**given, "stage": STAGES[backend.shard]},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[backend.reduce_dtype],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
