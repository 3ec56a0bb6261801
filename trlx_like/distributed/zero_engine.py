"""The calls of DeepSpeed that are not public. Each has a test, which a release of DeepSpeed that changes one fails.

DeepSpeed reduces gradients and divides weights; the optimizer is ours, on the memory in which DeepSpeed keeps this
process's part of each weight in float32.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Part = tuple[Tensor, int]
"""This process's numbers of a weight, and the place of the first of them in the flattened weight. [N]"""


def _deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compiled
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls it
    if device.type == "cpu":
        compiled["deepspeed_shm_comm"] = False  # it would be compiled at the start of every run, for a minute
    return deepspeed


def divide(
    weights: Iterable[nn.Parameter],
    read: Callable[[nn.Parameter], Tensor],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Divide weights before an engine is made: one is whole at a time, and has the numbers of the first process.

    Args:
        weights: The weights, whose memory is not used. They become plain parameters.
        read: Returns a weight with its numbers; those of other processes than the first are not looked at.
        options: The configuration of DeepSpeed.
        device: The device of this process.
    """
    moved = options["zero_optimization"].get("offload_param", {})
    where = {"remote_device": moved.get("device"), "pin_memory": moved.get("pin_memory", False)}
    init = _deepspeed(device).zero.Init(module=nn.Module(), config_dict_or_path=options, **where)
    for weight in weights:
        weight.data = read(weight)
        weight.__class__ = nn.Parameter
        init._convert_to_zero_parameters([weight])


def start(model: nn.Module, trained: Sequence[nn.Parameter], options: dict[str, Any], device: torch.device) -> Any:
    """Make an engine of DeepSpeed, which brings the model to the device with the same weights on all processes.

    Args:
        model: The model.
        trained: Its weights that are trained.
        options: The configuration of DeepSpeed.
        device: The device of this process.
    """
    deepspeed = _deepspeed(device)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_Nothing(trained), config=options, dist_init_required=False
    )
    return engine


def forget_order(engine: Any) -> None:
    """Gather weights when they are used, not ahead of it in the order of the last forward pass.

    For models in which modules have other weights in some passes, which DeepSpeed ends with an error.
    """
    engine.optimizer.parameter_offload.fwd_pre_hook.remove()


class _Nothing(Optimizer):
    """Change nothing: DeepSpeed needs an optimizer, and its step then hands the weights that ours has changed on."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def backward(engine: Any, loss: Tensor, last: bool) -> None:
    """Add the gradients of one micro-batch.

    Args:
        engine: The engine.
        loss: The loss. []
        last: Whether it is the last micro-batch of the step.
    """
    engine.optimizer.clear_backward_seen_flag()  # the engine's own forward pass would do these two
    engine.set_gradient_accumulation_boundary(last)
    engine._backward_prologue()
    engine.backward(loss, scale_wrt_gas=False)


@torch.no_grad()
def hand_on(engine: Any, used: Iterable[Tensor]) -> None:
    """Give all processes the weights that the optimizers have changed, and free the gradients of the used ones."""
    engine.optimizer.step()
    for weight in filter(_is_divided, used):
        gradient(engine, weight).zero_()  # or a later step would add to it, if its first micro-batch does not use it


@torch.no_grad()
def show(engine: Any, parts: Mapping[Tensor, Any]) -> None:
    """Let modules see parts of trained weights that were changed outside of a step.

    Args:
        engine: The engine.
        parts: The trained weights, each with its `updated` part.
    """
    if not any(map(_is_divided, parts)):
        engine.optimizer.update_lp_params()
    for weight, part in parts.items():
        if (own := stored(weight)) is not None:
            own[0].copy_(part.values)


def updated(engine: Any, parameter: Tensor) -> Part:
    """Return the part of a trained weight that this process updates, with its memory in float32."""
    if _is_divided(parameter):
        values, _ = engine.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)
        begin = _begin(parameter, values.numel())
        return values[: parameter.ds_numel - begin], begin  # type: ignore[attr-defined]
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return torch.empty(0, device=engine.optimizer.device), 0
    return mapping.get_hp_fragment().detach(), mapping.lp_fragment_address.start


def gradient(engine: Any, parameter: Tensor) -> Tensor:
    """Return the gradient of what `updated` returns, summed over processes. [N]"""
    zero = engine.optimizer
    if _is_divided(parameter):
        values: Tensor = zero._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)[0].flatten()
        return values[: parameter.ds_numel - _begin(parameter, values.numel())]  # type: ignore[attr-defined]
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return torch.empty(0, device=zero.device)
    if mapping.use_offload:
        place = mapping.get_hp_fragment_address()
        flat: Tensor = zero.single_partition_of_fp32_groups[0].grad
        return flat.narrow(0, place.start, place.numel)
    found: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
    return found.flatten()


def stored(weight: Tensor) -> Part | None:
    """Return this process's numbers of a weight that is divided, with their memory; None for one that is not."""
    if not _is_divided(weight):
        return None
    values = weight.ds_tensor  # type: ignore[attr-defined]
    begin = _begin(weight, values.numel())
    return values.detach()[: weight.ds_numel - begin], begin  # type: ignore[attr-defined]


def _begin(weight: Tensor, share: int) -> int:
    """Return the place of this process's first number in a divided weight, of which each process has a share."""
    place: int = min(share * weight.ds_process_group.rank(), weight.ds_numel)  # type: ignore[attr-defined]
    return place


def shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight, also if it is divided."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def release(weights: Sequence[Tensor]) -> None:
    """Free what is gathered of divided weights, so that the next use gathers what is stored."""
    for weight in weights:
        if _is_divided(weight):
            weight.partition()  # type: ignore[attr-defined]


def _is_divided(weight: Tensor) -> bool:
    return hasattr(weight, "ds_id")


Hooks = dict[nn.Module, tuple[set[int], set[int]]]
"""The hooks of each module: before and after its forward pass."""


def hooks(modules: Sequence[nn.Module]) -> Hooks:
    """Return the hooks of each module, to find out later which ones DeepSpeed has added."""
    return {module: (set(module._forward_pre_hooks), set(module._forward_hooks)) for module in modules}


@contextmanager
def plain(weights: Sequence[nn.Parameter], added: Hooks) -> Iterator[None]:
    """Gather divided weights for a `with` block, in which modules are plain ones without hooks of DeepSpeed.

    Args:
        weights: All weights of the modules.
        added: The hooks that DeepSpeed has added to each module.
    """
    import deepspeed

    release(weights)
    kept = []
    for module, numbers in added.items():
        of_module = (module._forward_pre_hooks, module._forward_hooks)
        taken = [
            {key: hook for key, hook in held.items() if key in own}
            for held, own in zip(of_module, numbers, strict=True)
        ]
        kept.append((module, module._parameters, taken))
        for held, own in zip(of_module, taken, strict=True):
            for key in own:
                del held[key]
        module._parameters = dict(module._parameters)
    try:
        with deepspeed.zero.GatheredParameters(weights):
            yield
    finally:
        for module, parameters, taken in kept:
            module._parameters = parameters
            for held, own in zip((module._forward_pre_hooks, module._forward_hooks), taken, strict=True):
                others = dict(held)
                held.clear()
                held.update({**own, **others})  # weights are gathered before other hooks run
