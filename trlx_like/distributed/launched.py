"""What a launcher asks for in environment variables: it is what the configuration says, or it is refused.

`accelerate launch` hands its YAML and options to a program as variables, and a program that does not read them trains
in another way than its user believes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError

SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers give the number of processes."""

UNSUPPORTED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
PLUGINS = {"fsdp_plugin": "FSDP", "deepspeed_plugins": "DeepSpeed", "megatron_lm_plugin": "Megatron-LM"} | {
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "a parallelism_config",
}
"""Attributes of accelerate's state that a program has set which made an Accelerator of its own."""


def check_launcher(config: TRLConfig, environment: Mapping[str, str] | None = None) -> None:
    """Compare what the launcher asks for with the configuration, before anything is started.

    Args:
        config: The complete configuration.
        environment: The environment variables; None: those of this process.

    Raises:
        ConfigError: For the first difference. It names the option and the launcher's setting.
    """
    for sentence in _differences(config, os.environ if environment is None else environment):
        raise ConfigError(sentence)


def check_state(config: TRLConfig, state: Any, environment: Mapping[str, str] | None = None) -> None:
    """Check that accelerate has started what was asked for.

    Args:
        config: The complete configuration.
        state: `Accelerator.state`. It has the plugins of an Accelerator that the program made before.
        environment: The environment variables; None: those of this process.

    Raises:
        ConfigError: If fewer processes know of each other than were started, or a plugin is set.
    """
    wanted = _processes(os.environ if environment is None else environment)
    if wanted != state.num_processes:
        raise ConfigError(
            f"The launcher started {wanted} processes, and this one knows of {state.num_processes}. Make no "
            "Accelerator of your own before train, and set ACCELERATE_USE_CPU=true for several processes without GPUs."
        )
    for attribute, name in PLUGINS.items():
        if getattr(state, attribute, None) is not None:
            raise ConfigError(
                f"The program made an Accelerator with {name} ({attribute}), and {_kind(config)} does not follow it. "
                "Leave it out."
            )
    compiler = getattr(getattr(state, "dynamo_plugin", None), "backend", "NO")
    if str(getattr(compiler, "value", compiler)).upper() != "NO":
        raise ConfigError(f"The program made an Accelerator with the dynamo_backend {compiler}: {_NO_COMPILER}")


_NO_COMPILER = "trainers do not compile their models. Leave it out."


def _differences(config: TRLConfig, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each setting of the launcher that the configuration does not follow."""
    precision, own = given.get("ACCELERATE_MIXED_PRECISION", "no").lower(), config.backend.mixed_precision
    if precision not in ("no", own):  # "no" is also what the launcher sets when nothing was asked for
        yield (
            f"backend.mixed_precision ({own!r}): the launcher asks for {precision!r} (mixed_precision, "
            "ACCELERATE_MIXED_PRECISION). Set both to the same."
        )
    kinds = {"ACCELERATE_USE_FSDP": ("FSDP", "fsdp"), "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "deepspeed")}
    for variable, (name, kind) in kinds.items():
        if _on(given, variable) and config.backend.kind != kind:
            yield (
                f"The launcher, or an Accelerator that the program made, asks for {name} ({variable}), and "
                f"{_kind(config)} holds weights in another way. Set backend.kind to the same, or leave {name} out: "
                "distributed_type: MULTI_GPU starts processes."
            )
    if _on(given, "ACCELERATE_USE_FSDP"):
        yield from _other_fsdp(config, given)
    if _on(given, "ACCELERATE_USE_DEEPSPEED"):
        yield from _other_deepspeed(config, given)
    for variable, name in UNSUPPORTED.items():
        if _on(given, variable):
            yield f"The launcher asks for {name} ({variable}), which trlx_like does not have. Leave it out."
    compiler = given.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.upper() != "NO":
        yield f"The launcher asks for the dynamo_backend {compiler} (ACCELERATE_DYNAMO_BACKEND): {_NO_COMPILER}"
    steps = given.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        yield (
            f"train.minibatch_size ({config.train.minibatch_size}): the launcher asks for {steps} "
            "gradient_accumulation_steps (ACCELERATE_GRADIENT_ACCUMULATION_STEPS). Leave them out: train.batch_size is "
            "over all processes, and minibatch_size says how much of it goes through the model at once."
        )
    if _processes(given) == 1 and "ACCELERATE_MIXED_PRECISION" in given and "MASTER_ADDR" in given:
        yield (
            "accelerate launch was asked for several processes (MASTER_ADDR is set) and has started one, as it does "
            "with --cpu and with distributed_type: MULTI_CPU without mpirun. Use distributed_type: MULTI_GPU with "
            "use_cpu: true (configs/accelerate/cpu2.yaml), torchrun, or trlx-like train --num-processes."
        )


def _other_fsdp(config: TRLConfig, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option of `fsdp_config` that asks for another division than the section `backend`.

    Options that change no number and no memory at rest are not compared: prefetching, format of state dicts, loading.
    """
    backend = config.backend
    wanted = {
        "FSDP_VERSION": ("2", "the backend is FSDP2"),
        "FSDP_RESHARD_AFTER_FORWARD": (_text(backend.shard != "gradients"), f"backend.shard is {backend.shard}"),
        "FSDP_OFFLOAD_PARAMS": (_text(backend.offload == "all"), f"backend.offload is {backend.offload}"),
        "FSDP_ACTIVATION_CHECKPOINTING": (
            _text(backend.gradient_checkpointing),
            f"backend.gradient_checkpointing is {_text(backend.gradient_checkpointing)}",
        ),
        "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "the units are the blocks of the model"),
    }
    yield from _unequal("fsdp_config", "", wanted, given)
    for variable in ("FSDP_IGNORED_MODULES", "FSDP_TRANSFORMER_CLS_TO_WRAP"):
        if given.get(variable):
            yield (
                f"The launcher asks for {variable.lower()}: {given[variable]}, and backend.kind: fsdp divides all "
                "weights, block by block as the model names its blocks. Leave it out."
            )


def _other_deepspeed(config: TRLConfig, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each option of `deepspeed_config` that the configuration does not say.

    `zero3_init_flag` and `zero3_save_16bit_model` are not compared: how weights are read and written is our own.
    """
    backend, stages = config.backend, {"optimizer": "1", "gradients": "2", "full": "3"}
    shard, offload = f"backend.shard is {backend.shard}", f"backend.offload is {backend.offload}"
    clipping = given.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    norm = config.train.max_grad_norm
    same = clipping == "none" if norm is None else clipping in ("none", str(norm), f"{norm:g}")
    wanted = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": (stages.get(backend.shard, "3"), shard),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none" if backend.offload == "none" else "cpu", offload),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("cpu" if backend.offload == "all" else "none", offload),
        "ACCELERATE_GRADIENT_CLIPPING": (clipping if same else str(norm).lower(), f"train.max_grad_norm is {norm}"),
    }
    yield from _unequal("deepspeed_config", "ACCELERATE_(DEEPSPEED_)?", wanted, given)
    for variable in ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"):
        if given.get(variable, "none").lower() != "none":
            name = variable.removeprefix("ACCELERATE_").lower()
            yield (
                f"The launcher asks for {name}: {given[variable]}, which is not read. Leave it out, and set options of "
                "zero_optimization in backend.deepspeed_config."
            )


def _unequal(
    section: str, prefix: str, wanted: Mapping[str, tuple[str, str]], given: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence for each variable with another value than the configuration wants.

    Args:
        section: The section of the launcher's YAML.
        prefix: What its options lack of the names of their variables, as a regular expression.
        wanted: For each variable its value, and why it has to be that one.
        given: The environment variables.
    """
    for variable, (value, because) in wanted.items():
        name = re.sub(f"^{prefix}", "", variable).lower()
        if given.get(variable, value).lower() != value.lower():
            yield (
                f"The launcher asks for {name}: {given[variable]}, and {because}. Set {section}.{name} to {value}, or "
                "the option of our configuration."
            )


def _text(value: bool) -> str:
    return "true" if value else "false"


def _kind(config: TRLConfig) -> str:
    return f"backend.kind: {config.backend.kind}"


def _on(given: Mapping[str, str], variable: str) -> bool:
    return given.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")


def _processes(given: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher says it has started."""
    return next((int(given[name]) for name in SIZES if given.get(name, "").isdecimal()), 1)
