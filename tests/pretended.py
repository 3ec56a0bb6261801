"""A device that is not there, to find code that would mix devices on a GPU.

Its tensors hold their numbers in tensors on the CPU. Each operation is refused that gets tensors from both places, as
CUDA refuses it; numbers without dimensions, copies, and indices of tensors on the device may come from the CPU. What
needs memory of their own fails or differs: checkpoints, and a tied weight becomes two when its model is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
TAKE_BOTH = ("aten::copy_", "aten::_to_copy", "aten::index.", "aten::index_put", "aten::_index_put")
"""Operations that take tensors on the CPU beside those on the device."""
MAKERS = (torch.tensor, torch.as_tensor)


class _Backend:
    """What torch asks of the module of a device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers come from the CPU."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


class There(Tensor):
    """A tensor on the device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        about: dict[str, Any] = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        made: There = Tensor._make_wrapper_subclass(cls, inner.size(), device=DEVICE, **about)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError(f"cannot convert a tensor on {DEVICE} to numpy: use Tensor.cpu() first")

    def __array__(self, dtype: Any = None) -> NoReturn:
        self.numpy()


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, There) else value


def _there(value: Any) -> Any:
    return There(value) if isinstance(value, Tensor) and not isinstance(value, There) else value


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do an operation on the CPU, and return tensors on the device if it would have been done there."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    here = [tensor for tensor in tensors if not isinstance(tensor, There)]
    name = func._schema.name + "." + func._schema.overload_name
    mixed = there and any(tensor.dim() for tensor in here) and not name.startswith(TAKE_BOTH)
    if mixed or (there and name.startswith(TAKE_BOTH[2:]) and not isinstance(args[0], There)):
        places = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"Expected all tensors of {name} to be on the same device, but got {places}.")
    if name.startswith("aten::copy_"):
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    asked = kwargs.get("device")
    if _is_ours(asked):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not (_is_ours(asked) or (asked is None and there)):
        return made
    written = {id(tensor.held): tensor for tensor in there} if func._schema.is_mutable else {}
    return tree_map(lambda value: written[id(value)] if id(value) in written else _there(value), made)


class _Everything(TorchDispatchMode):
    """Compute what has tensors on the device, and make there what is asked for there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """Make tensors from numbers on the CPU first: torch makes them below all modes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in MAKERS and _is_ours(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return There(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inner(target).copy_(_inner(source))
    return target


# What torch makes below all modes too, such as the numbers of an index.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Let a `with` block have the device, and yield it."""
    faster = torch.inference_mode
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else faster(False)  # type: ignore
    try:
        with _FromNumbers(), _Everything():
            yield DEVICE
    finally:
        torch.inference_mode = faster  # type: ignore[misc]
