"""States for checkpoints of modules and optimizers whose tensors are divided over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from trlx_like.functional.parts import Part


class Dividing(Protocol):
    """What `DividedState` needs of a backend."""

    def parts(self, item: Any) -> Any:
        """Return the state dict with `Part`s."""
        ...

    def restore(self, item: Any, state: Any) -> None:
        """Load a state dict with this process's `Part`s, or with whole tensors."""
        ...

    def own_range(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the range of this process in a flattened tensor."""
        ...


class DividedState:
    """Save and restore this process's parts of a module or optimizer, from the parts of any number of processes.

    Args:
        backend: Divides tensors.
        item: The module or optimizer.
    """

    def __init__(self, backend: Dividing, item: Any) -> None:
        self.backend, self.item = backend, item

    def state_dict(self) -> Any:
        """Return the state with `Part`s of divided tensors."""
        return self.backend.parts(self.item)

    def load_state_dict(self, state: Any) -> None:
        """Restore a state with this process's `Part`s, or with whole tensors."""
        self.backend.restore(self.item, state)

    def own_range(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the range of a flattened tensor that this process has to read."""
        return self.backend.own_range(shape)


def divided(
    state: dict[str, Any], trained: Sequence[tuple[Tensor, Tensor]], part: Callable[[Tensor, Tensor], Any]
) -> dict[str, Any]:
    """Replace the tensors of an optimizer's state that are laid out like a part of a weight.

    Args:
        state: The optimizer's state dict.
        trained: The weights in the optimizer's order, each with the part that the optimizer updates.
        part: Makes a `Part` of a tensor that is laid out like the part of a weight.
    """
    own = {
        number: {
            name: part(value, trained[number][0]) if _like(value, trained[number][1]) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": own}


def undivided(
    state: dict[str, Any], trained: Sequence[Tensor], own: Callable[[Sequence[int]], tuple[int, int]]
) -> dict[str, Any]:
    """Invert `divided`: replace whole tensors and `Part`s by tensors that are laid out like the part of a weight.

    Args:
        state: The state dict, with whole tensors or `Part`s.
        trained: The weights in the optimizer's order.
        own: Returns the range of this process in a flattened tensor.
    """

    def local(value: Any, weight: Tensor) -> Any:
        shape = tuple(weight.shape)
        if isinstance(value, Part):
            return value.values.view(-1, *shape[1:])
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == shape:
            return value.flatten()[slice(*own(shape))].view(-1, *shape[1:])
        return value

    found = {
        number: {name: local(value, trained[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": found}


def _like(value: Any, own: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == own.shape
