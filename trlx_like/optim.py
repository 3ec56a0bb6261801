"""Optimizers and learning-rate schedules by the names that a YAML gives them.

The optimizers are those of torch, under their class names, and the 8-bit ones of bitsandbytes. The schedules are three
of torch, and those of `transformers.get_scheduler`, which warm up and decay. A program may also give the objects.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler

from trlx_like.config import OptimizerConfig, SchedulerConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import needed
from trlx_like.registry import Registry

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizer", option="optimizer.name")
SCHEDULERS: Registry[Callable[..., LRScheduler]] = Registry("scheduler", option="scheduler.name")
register_optimizer = OPTIMIZERS.register
register_scheduler = SCHEDULERS.register

FUSED = ("Adam", "AdamW", "SGD")
"""Optimizers of torch that can update all parameters in one fused kernel."""
_STEPS: dict[type, Any] = {kind: inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
BOUNDED = ("adam", "adamw")
"""Optimizers whose steps `bounded` knows."""
OTHERS = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Other optimizers of torch, which are made from parameters and keyword arguments alone."""
BITSANDBYTES = {
    "adam_8bit_bnb": "Adam8bit",
    "adamw_8bit_bnb": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}
TRANSFORMERS = {"adamw": ["adamw_torch", "adamw_torch_fused"], "adamw_8bit_bnb": ["adamw_bnb_8bit", "adamw_8bit"]}
"""Aliases: the names that transformers uses for some of these optimizers."""

WARMING = (
    *("constant_with_warmup", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    *("polynomial", "inverse_sqrt", "warmup_stable_decay"),
)
"""Schedules of transformers. Two others are left out: they need a metric at each step, which the loop does not pass."""
SHARES = ("num_warmup_steps", "num_stable_steps", "num_decay_steps")
"""Arguments of these schedules that may be a fraction of all steps."""


AUTO = "auto"
"""Value of `optimizer.kwargs.lr` that stands for `learning_rate_for`."""
LEAST_RATE, MOST_RATE = 1e-6, 3e-3


def learning_rate_for(weights: int, adapter: bool = False) -> float:
    """Return a learning rate of Adam for a model of so many weights: 8 / weights^(3/4), from 1e-6 to 3e-3.

    For 1.6B weights and more it is TRL's rate of GRPO (1e-6), for the 124M of GPT-2 7e-6, and for the 8.6M of stories8M
    5e-5. There three times as much moves the policy by 20 nats per response in the first step, and ends farther from
    the start without a better score (docs/configuration.md, "What a preset decides").

    Args:
        weights: Number of weights of the whole model, frozen or not.
        adapter: Whether an adapter of it is trained, of any rank. It gets ten times the rate, as Schulman et al. (LoRA
            Without Regret, 2025) found best for supervised and for reinforcement learning alike.
    """
    return min(max(8.0 * (10 if adapter else 1) / math.pow(max(weights, 1), 0.75), LEAST_RATE), MOST_RATE)


def make_optimizer(
    parameters: Sequence[nn.Parameter],
    config: OptimizerConfig,
    undecayed: Sequence[bool] = (),
    rate: float | None = None,
) -> Optimizer:
    """Make the optimizer that the section `optimizer` describes.

    Args:
        parameters: The parameters to update.
        config: The section `optimizer`.
        undecayed: For each parameter, whether `optimizer.no_decay` is about it; see `norms_and_biases`.
        rate: The learning rate that "auto" stands for; None: that of a model of these parameters.

    Raises:
        RegistryError: if no optimizer has that name.
        ConfigError: if the optimizer refuses its keyword arguments, or has no weight decay to leave out.
    """
    given: Sequence[Any] = parameters
    if config.no_decay and any(undecayed):
        groups = ([p for p, one in zip(parameters, undecayed, strict=True) if one is out] for out in (False, True))
        decayed, rest = groups
        given = [*([{"params": decayed}] if decayed else []), {"params": rest, "weight_decay": 0.0}]
    kwargs = config.kwargs
    if kwargs.get("lr") == AUTO:
        count = sum(parameter.numel() for parameter in parameters)
        kwargs = {**kwargs, "lr": learning_rate_for(count) if rate is None else rate}
    with _refused("optimizer", kwargs):
        optimizer = OPTIMIZERS.get(config.name)(given, **kwargs)
    if config.no_decay and not optimizer.defaults.get("weight_decay"):
        raise ConfigError(
            f"optimizer.no_decay ({config.no_decay}) needs a weight decay: set optimizer.kwargs.weight_decay, for an "
            f"optimizer that has one."
        )
    return optimizer


def adopted(optimizer: Optimizer, model: nn.Module, loaded: Any = None) -> Optimizer:
    """Let an optimizer that the program has made update exactly the trained parameters of a model.

    A frozen parameter leaves the optimizer. A parameter that the trainer has added to the model, such as that of a
    value head or of an adapter, joins the last group.

    Args:
        optimizer: The optimizer, which is changed.
        model: The model of the trainer.
        loaded: The model that the program has given, whose trained parameters the optimizer must have.

    Raises:
        ConfigError: If the optimizer is for another model, lacks parameters, or can only step with a closure.
    """
    place = f"optimizer.name ({type(optimizer).__name__})"
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{place}: its step needs a closure, which the loop does not have.")
    trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if given.isdisjoint(model.parameters()):
        raise ConfigError(
            f"{place}: none of its parameters is one of the model's. Give the loaded model as model.model_path, and "
            "make the optimizer of the parameters of that."
        )
    beside_adapter = given.isdisjoint(trained)  # an adapter, which is part of the loaded model by now, has come since
    own = set(loaded.parameters()) if isinstance(loaded, nn.Module) and not beside_adapter else set()
    if lacking := [name for parameter, name in trained.items() if parameter in own - given]:
        raise ConfigError(
            f"{place}: {len(lacking)} trained parameters of the model are not in it, such as {lacking[0]}. Add them, "
            "or freeze them with requires_grad_(False) before."
        )
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in trained]
        group.pop("param_names", None)
    optimizer.param_groups[-1]["params"] += [parameter for parameter in trained if parameter not in given]
    for parameter in given.difference(trained):
        optimizer.state.pop(parameter, None)
    return optimizer


def norms_and_biases(model: nn.Module) -> list[bool]:
    """Tell for each trained parameter of a model whether it is a bias or belongs to a normalization layer.

    As in transformers' Trainer, except that layers are known by their class: diffusers calls some of them `norm1`.
    """
    found = {
        parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "norm" in type(module).__name__.lower() or "bias" in f"{path}.{name}"
    }
    return [parameter in found for parameter in model.parameters() if parameter.requires_grad]


def bounded(optimizer: Optimizer) -> bool:
    """Tell whether the numbers that go into a step bound how far it changes a weight: plain Adam."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    plain = not any(group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups)
    return plain and not any(hooks) and inspect.unwrap(optimizer.step) is _STEPS.get(type(optimizer))


def make_scheduler(optimizer: Optimizer, config: SchedulerConfig, total_steps: int | None = None) -> LRScheduler:
    """Make the learning-rate schedule that the section `scheduler` describes.

    Args:
        optimizer: the optimizer whose learning rate it sets, after each optimizer step.
        config: the section `scheduler`.
        total_steps: `num_training_steps` of a schedule of transformers, unless `scheduler.kwargs` has it. Numbers of
            steps below 1 are fractions of it.

    Raises:
        RegistryError: if no schedule has that name.
        ConfigError: if the schedule refuses its keyword arguments, or cannot warm up.
    """
    if not isinstance(config.name, str):
        return cast(LRScheduler, config.name)
    name, kwargs = SCHEDULERS.canonical(config.name), config.kwargs
    if "warmup_ratio" in kwargs:
        raise ConfigError(
            "scheduler.kwargs.warmup_ratio: write scheduler.warmup, of which 0.1 is a tenth of the steps."
        )
    if config.warmup:
        if "num_warmup_steps" in kwargs:
            raise ConfigError(
                f"scheduler.warmup ({config.warmup}) and scheduler.kwargs.num_warmup_steps are the same: leave one out."
            )
        name = {"constant": "constant_with_warmup"}.get(name, name)
        kwargs = {"num_warmup_steps": config.warmup, **kwargs}
        if name not in (*WARMING, "linear"):
            raise ConfigError(
                f"scheduler.warmup ({config.warmup}) needs one of {', '.join(WARMING)} or linear, not {name}."
            )
    if name in WARMING or (name == "linear" and "num_warmup_steps" in kwargs):
        kwargs = {"num_training_steps": total_steps, **kwargs}
        for share in SHARES:
            if isinstance(part := kwargs.get(share), float) and 0 < part < 1 and kwargs["num_training_steps"]:
                kwargs[share] = math.ceil(part * kwargs["num_training_steps"])
    with _refused("scheduler", kwargs):
        return SCHEDULERS.get(name)(optimizer, **kwargs)


REFUSALS = (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError)
"""What the classes of torch raise for arguments that they cannot use, when they are made or only in a step."""
TRIED_STEPS = 1000
"""Most steps that `try_out` makes."""


def try_out(optimizer: OptimizerConfig, scheduler: SchedulerConfig, total_steps: int) -> None:
    """Make the optimizer and the schedule and let them take the first steps, on a parameter of their own.

    Args:
        optimizer: the section `optimizer`.
        scheduler: the section `scheduler`.
        total_steps: as in `make_scheduler`.

    Raises:
        RegistryError: if no optimizer or schedule has that name.
        ConfigError: if one of them refuses its arguments, or sets a learning rate that is not a number of at least 0.
    """
    if not (isinstance(optimizer.name, str) and isinstance(scheduler.name, str)):
        return  # objects are not to take steps before the run
    parameter = nn.Parameter(torch.zeros(2, 2))
    made = make_optimizer([parameter], optimizer)
    schedule = make_scheduler(made, scheduler, total_steps)
    parameter.grad = torch.zeros_like(parameter)
    with _refused("optimizer", optimizer.kwargs):
        made.step()
    for step in range(1, min(total_steps, TRIED_STEPS) + 1):
        with _refused("scheduler", scheduler.kwargs):
            schedule.step()
        for rate in map(float, schedule.get_last_lr()):
            if not (math.isfinite(rate) and rate >= 0):
                raise ConfigError(f"scheduler.kwargs ({scheduler.kwargs}): the learning rate of step {step} is {rate}.")


@contextmanager
def _refused(option: str, kwargs: dict[str, Any]) -> Iterator[None]:
    """Turn what torch refuses in a `with` block into an error that names the option."""
    try:
        yield
    except REFUSALS as error:
        why = f"{type(error).__name__}: " * isinstance(error, LookupError) + " ".join(str(error).split())
        raise ConfigError(f"{option}.kwargs ({kwargs}): {why}") from error


def _fused(kind: type[Optimizer], parameters: Iterable[Any], **kwargs: Any) -> Optimizer:
    """Make an optimizer with one fused kernel if the device has it: a loop over many small parameters is slow."""
    if not {"foreach", "fused"} & set(kwargs):
        every = [p for one in parameters for p in (one["params"] if isinstance(one, dict) else [one])]
        kwargs["fused"] = all(p.device.type in ("cpu", "cuda") for p in every)
    return kind(parameters, **kwargs)


def _bitsandbytes(name: str, parameters: Sequence[nn.Parameter], **kwargs: Any) -> Optimizer:
    """Make an optimizer of bitsandbytes by the name of its class."""
    with needed("optimizer.name: 8-bit optimisers need bitsandbytes", "bitsandbytes"):
        import bitsandbytes
    return cast(Optimizer, getattr(bitsandbytes.optim, name)(parameters, **kwargs))


def _warming(name: str, optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """Make a schedule of transformers; without `num_warmup_steps` it does not warm up."""
    from transformers import get_scheduler

    warmup, total = kwargs.pop("num_warmup_steps", 0), kwargs.pop("num_training_steps", None)
    return cast(LRScheduler, get_scheduler(name, optimizer, warmup, total, kwargs))


@register_scheduler("constant")
def constant(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """Make torch's ConstantLR, with a factor of 1 unless one is given."""
    return ConstantLR(optimizer, **{"factor": 1.0, **kwargs})


@register_scheduler("linear")
def linear(optimizer: Optimizer, **kwargs: Any) -> LRScheduler:
    """Make torch's LinearLR, or the schedule `linear` of transformers if the arguments are for that one."""
    own = {"num_warmup_steps", "num_training_steps"} & set(kwargs)
    return _warming("linear", optimizer, **kwargs) if own else LinearLR(optimizer, **kwargs)


register_scheduler("cosine_annealing")(CosineAnnealingLR)
for _name in WARMING:
    register_scheduler(_name, aliases=["wsd"] * (_name == "warmup_stable_decay"))(partial(_warming, _name))
for _name in OTHERS:
    register_optimizer(_name.lower())(getattr(torch.optim, _name))
for _name in FUSED:
    register_optimizer(_name.lower(), aliases=TRANSFORMERS.get(_name.lower(), ()))(
        partial(_fused, getattr(torch.optim, _name))
    )
for _name, _class in BITSANDBYTES.items():
    register_optimizer(_name, aliases=TRANSFORMERS.get(_name, ()))(partial(_bitsandbytes, _class))
