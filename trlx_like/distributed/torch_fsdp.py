"""The calls of torch's FSDP2 that are not public. Each has a test, which a release of torch that changes one fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

Attributes = Mapping[nn.Module, set[str]]
"""The names of the attributes of modules."""


def start(model: nn.Module) -> None:
    """Do what the first forward pass of the root would do, so that other passes may come first.

    State dict hooks are removed: they would divide the weights in the middle of a block in which they are whole.
    """
    # Outputs of the root may be views: its backward pass begins with the loss (`begin_backward`).
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view", UserWarning)
    state = model._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()
    for of_module in state._state_ctx.all_states:
        for group in _groups(of_module):
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()


def _groups(state: Any) -> Sequence[Any]:
    """Return the groups of weights of a module; before torch 2.12 it has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return cast("Sequence[Any]", state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def begin_backward(model: nn.Module, loss: Tensor) -> None:
    """Let the backward pass of a loss begin with the root, also if no output of its forward pass has a gradient.

    Otherwise the gradients of heads that are called after the forward pass would not be summed.
    """
    loss.register_hook(model._get_fsdp_state()._pre_backward)  # type: ignore[operator]


def gather(unit: FSDPModule) -> None:
    """Gather the weights of a unit, which may be a `plain` module at present. Every process calls it."""
    with torch.inference_mode(False), torch.no_grad():  # their memory is used in training too
        for group in _groups(_get_module_fsdp_state(unit)):  # type: ignore[arg-type]
            group.lazy_init()
            group.unshard()
            group.wait_for_unshard()


def divide(unit: FSDPModule) -> None:
    """Free the gathered weights of a unit, which may be a `plain` module at present."""
    for group in _groups(_get_module_fsdp_state(unit)):  # type: ignore[arg-type]
        group.reshard()


@contextmanager
def plain(units: Sequence[FSDPModule], before: Attributes) -> Iterator[None]:
    """Give modules their own classes and attributes back for a `with` block, without hooks.

    Then they can be copied, run differently often on each process, and are not taken for divided ones by transformers.

    Args:
        units: The modules that were divided, with their weights gathered.
        before: The attributes of all modules before they were divided. FSDP has added the others.
    """
    hooks = []
    for unit in units:
        assert isinstance(unit, nn.Module)
        state = unit._get_fsdp_state()
        first, last = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        hooks.append((unit, type(unit), first, unit._forward_pre_hooks.pop(first), last, unit._forward_hooks.pop(last)))
    added = {
        module: {name: vars(module)[name] for name in set(vars(module)) - names} for module, names in before.items()
    }
    for unit in units:
        unit.__class__ = type(unit).__mro__[getattr(FSDPModule, "_orig_cls_mro_index", 2)]  # 2 before torch 2.11
    for module, values in added.items():
        for name in values:
            del module.__dict__[name]
    try:
        yield
    finally:
        for module, values in added.items():
            module.__dict__.update(values)
        for module, kind, first, enter, last, leave in hooks:
            module.__class__ = kind
            others = dict(module._forward_pre_hooks)
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update({first: enter, **others})  # weights are gathered before other hooks run
            module._forward_hooks[last] = leave
