"""States for checkpoints of modules and optimizers whose tensors are divided over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trlx_like.distributed.backend import Backend
from trlx_like.functional.parts import Part, Saved


class DividedState:
    """Save and restore this process's parts of a module or optimizer, from the parts of any number of processes.

    Args:
        backend: Divides tensors.
        item: The module or optimizer.

    Attributes:
        reads_parts: Tells `TrainState` that a saved tensor suffices in place of a whole one.
    """

    reads_parts = True

    def __init__(self, backend: Backend, item: Any) -> None:
        self.backend, self.item = backend, item

    def state_dict(self) -> Any:
        """Return the state with `Part`s of divided tensors."""
        return self.backend.parts(self.item)

    def load_state_dict(self, state: Any) -> None:
        """Restore a state with whole tensors, `Part`s or saved tensors."""
        self.backend.restore(self.item, state)


def divided(state: dict[str, Any], trained: Sequence[Part]) -> dict[str, Any]:
    """Replace the tensors of an optimizer's state that are laid out like the part of a weight by `Part`s.

    Args:
        state: The optimizer's state dict.
        trained: The parts of weights that the optimizer updates, in its order.
    """

    def part(value: Any, like: Part) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape == like.values.shape:
            return replace(like, values=value)
        return value

    return _mapped(part, state, trained)


def undivided(state: dict[str, Any], trained: Sequence[Part]) -> dict[str, Any]:
    """Invert `divided`: replace whole tensors, `Part`s and saved tensors by what this process holds of them.

    Args:
        state: The state dict.
        trained: The parts of weights that the optimizer updates, in its order.
    """

    def own(value: Any, like: Part) -> Any:
        divided = isinstance(value, (Part, Saved, Tensor)) and len(value.shape) > 0
        return like.like(value) if divided and tuple(value.shape) == like.shape else value

    return _mapped(own, state, trained)


def _mapped(change: Callable[[Any, Part], Any], state: dict[str, Any], trained: Sequence[Part]) -> dict[str, Any]:
    """Change the values of an optimizer's state, each with the part of the weight that it is the state of."""
    changed = {
        number: {name: change(value, trained[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": changed}
