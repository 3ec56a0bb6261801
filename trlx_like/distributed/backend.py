"""How the weights of a run are held by its processes: the class `Backend`, and the registry of its kinds.

Trainers, losses and samplers do not know about it. The loop samples and evaluates inside `sampling`, where modules are
plain modules, and steps run through the other methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trlx_like.config import TRLConfig
from trlx_like.distributed.world import World
from trlx_like.registry import Registry

BACKENDS: Registry[Callable[[World, TRLConfig], Backend]] = Registry(
    "backend",
    option="backend.kind",
    lazy={
        "ddp": "trlx_like.distributed.replicated:ReplicatedBackend",
        "fsdp": "trlx_like.distributed.fsdp:make_sharded",
        "deepspeed": "trlx_like.distributed.zero:make_zero",
    },
)
register_backend = BACKENDS.register

T = TypeVar("T")
Value = Callable[[Tensor, Tensor], Tensor]
"""Computes the new value of a weight from its present value and the weight that it follows, number by number."""


class Backend(ABC):
    """Define the interface of a backend. The class is registered with `@register_backend("my_backend")`.

    It is made once in each process, as `MyBackend(world, config)`, and raises ConfigError for what it cannot do. Every
    process calls every method, in the same order, except for `own`. What a method does by default is right where every
    process holds all weights.

    Args:
        world: The processes of the run.
        config: The complete configuration.

    Attributes:
        sharded: Whether processes hold different parts of the weights. Then a backward pass of one process waits for
            the others.
        reads_files: Whether `prepare` reads weights that are `Unread`, so that models are loaded without them.
        after_sampling: Functions to call at the end of a `sampling` block that is not inside another.
    """

    sharded = False
    reads_files = False

    def __init__(self, world: World, config: TRLConfig) -> None:
        self.world, self.config = world, config
        self.after_sampling: list[Callable[[], None]] = []
        self._sampling = 0  # blocks that are entered

    @abstractmethod
    def prepare(self, model: nn.Module, others: Sequence[nn.Module] = ()) -> None:
        """Bring the model to the device with the same weights on all processes, and divide them if it shards.

        With `reads_files`, raise ConfigError on all processes if one cannot read its part of an `Unread` weight.

        Args:
            model: The model of the trainer. Losses call it itself, not its parts.
            others: Modules with weights beside it that its forward pass runs, such as a reference. They are on the
                device already, with the same weights on all processes.
        """

    @abstractmethod
    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters for the optimizer: what this process updates of the model's trained weights."""

    def own(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight or gradient as a plain tensor that shares its memory."""
        return tensor

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of what this process updates of a weight, summed over processes; None without one."""
        return parameter.grad

    def microbatches(self, parts: Sequence[T], counts: Sequence[int]) -> list[tuple[T, float]]:
        """Weight this process's micro-batches, and add some of weight 0 if all processes must have equally many.

        Args:
            parts: The micro-batches of this process.
            counts: Their number on every process.
        """
        return [(part, 1.0) for part in parts]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch.

        Args:
            loss: The sum over the micro-batch, divided by the units of the global batch. []
        """
        self.world.accelerator.backward(loss)

    @abstractmethod
    def finish(self) -> Tensor:
        """Sum the gradients over processes, clip them, and return their norm [] before clipping."""

    def step(self, optimizer: Any, accepted: bool) -> None:
        """Make an optimizer step on the gradients that `finish` left.

        Args:
            optimizer: The optimizer of `trained`, as accelerate wraps it.
            accepted: False drops the gradients without a step.
        """
        if accepted:
            optimizer.step()

    def clear(self, optimizer: Any) -> None:
        """Free all gradients."""
        optimizer.zero_grad(set_to_none=True)

    def whole(self) -> AbstractContextManager[None]:
        """Put all weights into their places for a `with` block, in which modules are plain modules.

        Inside another such block it does nothing. Weights must not be changed in it.
        """
        return nullcontext()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Make the model ready for a `with` block in which processes may run it differently often."""
        self._sampling += 1
        try:
            with self.gathered_to_sample():
                yield
        finally:
            self._sampling -= 1
        for function in () if self._sampling else self.after_sampling:
            function()

    def gathered_to_sample(self) -> AbstractContextManager[None]:
        """Gather the weights for `sampling`.

        It is `whole`, unless `backend.rollout` is "layers": then a block's weights are whole while it runs.
        """
        return self.whole()

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the entries of a module's state dict as whole tensors, one at a time on every process."""
        yield from module.state_dict().items()

    @torch.no_grad()
    def write(self, pairs: Iterable[tuple[Tensor, Tensor]], value: Value) -> None:
        """Change weights in place, outside of the optimizer. The only place where weights are written to.

        Args:
            pairs: Weights to change, each with a weight of the same shape that it follows.
            value: Computes the new value.
        """
        for weight, followed in pairs:
            weight.copy_(value(weight, followed))

    def stateful(self, item: Any) -> Any:
        """Wrap a module or optimizer for checkpoints, which any number of processes of any backend can read."""
        return item

    def parts(self, item: nn.Module | Optimizer) -> Any:
        """Return the state dict of a module or optimizer with `functional.parts.Part` in place of divided tensors.

        For checkpoints to which every process writes its own part. Tensors that every process holds are plain; the
        main process writes them.
        """
        return item.state_dict()

    def restore(self, item: nn.Module | Optimizer, state: Any) -> None:
        """Load a state dict: what `parts` returned on any number of processes, with each `Part` read for this process.

        Args:
            item: The module or optimizer.
            state: The state dict. In place of a divided tensor it has the whole tensor, or the `Part` that this
                process's `parts` has at the same place.

        Raises:
            ValueError: If it has other entries or shapes.
        """
        item.load_state_dict(state)


def make_backend(world: World, config: TRLConfig) -> Backend:
    """Make the backend of a run, as the section `backend` says.

    Raises:
        RegistryError: If there is no backend of that name.
        ConfigError: If the backend cannot do what the configuration asks for.
    """
    return BACKENDS.get(config.backend.kind)(world, config)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Find the outermost modules of the classes that transformers and diffusers name in `_no_split_modules`."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    found: dict[nn.Module, None] = {}

    def look(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ not in names:
                look(child)
            elif any(True for _ in child.parameters()):
                found[child] = None

    look(model)
    return list(found)
