"""Calls of a model's modules without the parts of torch that a step of decoding does not need.

A step of a small batch is several hundred short operations, and half of its time is Python. Much of that is spent
between modules: each call looks for hooks, and each weight and submodule is found by a method in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel


@contextmanager
def lean(lm: PreTrainedModel) -> Iterator[None]:
    """Let modules without hooks call `forward` directly and find their weights at once, for the duration of a block.

    In the block nobody may add hooks to them, or replace a weight other than by `setattr`.

    Args:
        lm: The language model, whose modules compute the same as before.
    """
    changed = [] if _has_any_global_hook() else [module for module in lm.modules() if _is_plain(module)]
    kinds: list[Any] = [type(module) for module in changed]
    parts = [{**module._modules, **module._parameters} for module in changed]
    try:
        for module, kind, held in zip(changed, kinds, parts, strict=True):
            module.__class__ = _direct(kind)
            vars(module).update(held)
        yield
    finally:
        for module, kind, held in zip(changed, kinds, parts, strict=True):
            module.__class__ = kind
            for name in held:
                vars(module).pop(name, None)


def _is_plain(module: nn.Module) -> bool:
    """Tell whether a call of a module is a call of the method `forward` of its class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = type(module).__call__ is not nn.Module.__call__ or isinstance(module, PreTrainedModel)
    # Weights of other classes, such as parts of divided ones, may be replaced at each call.
    others = any(type(weight) not in (nn.Parameter, type(None)) for weight in module._parameters.values())
    return not (own or others or any(hooks) or "forward" in vars(module) or module._compiled_call_impl)


@cache
def _direct(kind: type[nn.Module]) -> Any:
    """Return a subclass of a kind of module, calls of which are calls of `forward`."""
    call = nn.Identity.forward if kind is nn.Dropout else kind.forward  # a model that decodes is in evaluation mode
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
