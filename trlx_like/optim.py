"""Optimiser and scheduler names, as a YAML gives them, to objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler

from trlx_like.config import OptimizerConfig, SchedulerConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import install_hint
from trlx_like.registry import Registry

OPTIMIZERS: Registry[Any] = Registry("optimizer")
SCHEDULERS: Registry[Any] = Registry("scheduler")
register_optimizer = OPTIMIZERS.register
register_scheduler = SCHEDULERS.register


@register_optimizer("adam")
def adam(parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    return torch.optim.Adam(parameters, **_fused(parameters, kwargs))


@register_optimizer("adamw")
def adamw(parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, **_fused(parameters, kwargs))


@register_optimizer("sgd")
def sgd(parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    return torch.optim.SGD(parameters, **_fused(parameters, kwargs))


@register_optimizer("adam_8bit_bnb")
def adam_8bit(parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    return _bitsandbytes("Adam8bit", parameters, kwargs)


@register_optimizer("adamw_8bit_bnb")
def adamw_8bit(parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    return _bitsandbytes("AdamW8bit", parameters, kwargs)


@register_scheduler("constant")
def constant(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    return ConstantLR(optimizer, **{"factor": 1.0, **kwargs})


@register_scheduler("cosine_annealing")
def cosine_annealing(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    return CosineAnnealingLR(optimizer, **kwargs)


@register_scheduler("linear")
def linear(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    return LinearLR(optimizer, **kwargs)


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """The optimiser of `optimizer.name` with `optimizer.kwargs`; ConfigError where it refuses them."""
    optimizer: Optimizer = _made("optimizer", OPTIMIZERS.get(config.name), parameters, config.kwargs)
    return optimizer


def make_scheduler(optimizer: Optimizer, config: SchedulerConfig) -> LRScheduler:
    """The scheduler of `scheduler.name`, stepped once an optimiser step."""
    scheduler: LRScheduler = _made("scheduler", SCHEDULERS.get(config.name), optimizer, config.kwargs)
    return scheduler


def _made(option: str, factory: Callable[..., Any], first: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return factory(first, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}.kwargs ({kwargs}): {error}") from error


def _fused(parameters: Sequence[nn.Parameter], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One kernel for all parameters where the device has it; a loop over many small ones costs more than the step."""
    if {"foreach", "fused"} & set(kwargs):
        return kwargs
    return {**kwargs, "fused": all(p.device.type in ("cpu", "cuda") for p in parameters)}


def _bitsandbytes(name: str, parameters: Sequence[nn.Parameter], kwargs: dict[str, Any]) -> Optimizer:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"optimizer.name: 8-bit optimisers need bitsandbytes ({error}): {install_hint('bitsandbytes')}."
        ) from error
    optimizer: Optimizer = getattr(bitsandbytes.optim, name)(parameters, **kwargs)
    return optimizer
