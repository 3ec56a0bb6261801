"""Runs code on tensors that have shapes and no memory, and counts the bytes that real ones would take.

`FakeTensorMode` of torch gives the shapes. What depends on values gets a fixed answer, which suits code that treats a
batch without padding: every mask is True everywhere, every number is 0 or 1.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are made in a `with` block and still alive, by kind.

    Args:
        kind: Names the kind of a new tensor.
    """

    def __init__(self, kind: Callable[[Tensor], str] = lambda tensor: "activations") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view of a tensor from outside, such as a weight, is no new memory.
        given = {id(tensor.untyped_storage()) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self._add(tensor)
        if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self._look(_worked_with(*args[1:3]))
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._held or not size:
            return
        kind = self.kind(tensor)

        def free(_: Any) -> None:
            del self._held[key]
            self.live[kind] -= size

        self._held[key] = weakref.ref(storage, free)
        self.live[kind] += size
        self._look()

    def _look(self, beside: int = 0) -> None:
        """Remember the live bytes, and those of one operation beside them, if they are the most so far."""
        if self.live.total() + beside > self.peak.total():
            self.peak = self.live + Counter(activations=beside)


def _worked_with(query: Tensor, key: Tensor) -> int:
    """Count the bytes that the backward pass of attention works with beside its results.

    On a GPU and in 16 bits it is the gradient of the queries in float32. On the CPU each thread, here one, has two
    blocks of scores.
    """
    length, keys = query.shape[-2], key.shape[-2]
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return max(4 * query.numel() * (query.element_size() < 4), 4 * 2 * block * min(512, keys))


class _Answers(TorchDispatchMode):
    """Answer what depends on the values of tensors that have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is aten.masked_select.default:
            return args[0].new_empty(args[0].numel())
        if func in INDEXED:
            args = (args[0], [one for index in args[1] for one in _numbers(index)], *args[2:])
        return func(*args, **(kwargs or {}))


def _numbers(index: Tensor | None) -> list[Tensor | None]:
    """Replace a mask that is True everywhere by the numbers of its entries, one tensor for each dimension."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64)] * index.dim()


class _Mode(FakeTensorMode):
    """Stay one when a tensor is copied.

    A copied tensor of torch's mode has a copy of the mode, and with it weak references to storages that nobody counted.
    They are freed twice, which corrupts the heap.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return self


@contextmanager
def imagined() -> Iterator[None]:
    """Give all tensors that are made in a `with` block a shape, a dtype and a device, and no memory."""
    convert = nn.Module._apply

    def in_place(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `Module.to` would swap the tensors of parameters, which fails for those that an autograd graph knows.
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = function(parameter.data)
            module._buffers.update({n: b if b is None else function(b) for n, b in module._buffers.items()})
        return self

    nn.Module._apply = in_place  # type: ignore[method-assign]
    # In inference mode operations arrive here whole, and what they consist of, such as reading a number, does not.
    faster = torch.inference_mode
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else faster(False)  # type: ignore
    try:
        with _Mode(allow_non_fake_inputs=True), _Answers():  # type: ignore[no-untyped-call]
            yield
    finally:
        nn.Module._apply, torch.inference_mode = convert, faster  # type: ignore[method-assign, misc]
