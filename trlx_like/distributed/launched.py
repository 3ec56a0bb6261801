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
PLUGINS = ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
"""Attributes of accelerate's state that a program has set which made an Accelerator of its own."""
OFF = ("", "0", "false", "no", "off", "n", "f")
"""Values of a variable that switch something on, by which it is off."""
SAME = "Leave it out, or set both to the same."
_NO_COMPILER = "trainers do not compile their models. Leave it out."


def check_launcher(config: TRLConfig, environment: Mapping[str, str] | None = None) -> None:
    """Compare what the launcher asks for with the configuration, before anything is started.

    Args:
        config: The complete configuration.
        environment: The environment variables; None: those of this process.

    Raises:
        ConfigError: For the first difference. It names the option and the launcher's setting.
    """
    given = os.environ if environment is None else environment
    for variable, followed, because in _followed(config, given):
        if (value := given.get(variable, followed[0])).lower() not in followed:
            name = re.sub("^ACCELERATE_(USE_|DEEPSPEED_)?", "", variable).lower()
            raise ConfigError(
                f"The launcher, or an Accelerator that the program made, asks for {name}: {value} ({variable}), and "
                f"{because}"
            )
    if _processes(given) == 1 and "ACCELERATE_MIXED_PRECISION" in given and "MASTER_ADDR" in given:
        raise ConfigError(
            "accelerate launch was asked for several processes (MASTER_ADDR is set) and has started one, as it does "
            "with --cpu and with distributed_type: MULTI_CPU without mpirun. Use distributed_type: MULTI_GPU with "
            "use_cpu: true (configs/accelerate/cpu2.yaml), torchrun, or trlx-like train --num-processes."
        )


def check_state(config: TRLConfig, state: Any) -> None:
    """Check that accelerate has started what was asked for.

    Args:
        config: The complete configuration.
        state: `Accelerator.state`. It has the plugins of an Accelerator that the program made before.

    Raises:
        ConfigError: If fewer processes know of each other than were started, or a plugin is set.
    """
    wanted = _processes(os.environ)
    if wanted != state.num_processes:
        raise ConfigError(
            f"The launcher started {wanted} processes, and this one knows of {state.num_processes}. Make no "
            "Accelerator of your own before train, and set ACCELERATE_USE_CPU=true for several processes without GPUs."
        )
    for plugin in PLUGINS:
        if getattr(state, plugin, None) is not None:
            raise ConfigError(
                f"The program made an Accelerator with a {plugin}, and backend.kind ({config.backend.kind}) does not "
                "follow it. Leave it out."
            )
    if (compiler := state.dynamo_plugin.backend.value) != "NO":
        raise ConfigError(f"The program made an Accelerator with the dynamo_backend {compiler}: {_NO_COMPILER}")


def _followed(config: TRLConfig, given: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield variables, each with the values that the configuration follows, in lower case, and with the reason.

    Options that change no number and no memory at rest are left out: those of prefetching, of the format of state
    dicts, and of reading and writing weights.
    """
    backend, norm = config.backend, config.train.max_grad_norm
    # "no" is also what the launcher sets when nothing was asked for.
    precision = f"backend.mixed_precision is {backend.mixed_precision!r}. {SAME}"
    yield "ACCELERATE_MIXED_PRECISION", ("no", backend.mixed_precision), precision
    for kind in ("fsdp", "deepspeed"):
        if backend.kind != kind:
            because = f"backend.kind is {backend.kind}, which holds weights in another way. {SAME}"
            yield f"ACCELERATE_USE_{kind.upper()}", OFF, f"{because} distributed_type: MULTI_GPU starts processes."
    for name in ("MEGATRON_LM", "PARALLELISM_CONFIG"):
        yield f"ACCELERATE_USE_{name}", OFF, "trlx_like does not have that. Leave it out."
    yield "ACCELERATE_DYNAMO_BACKEND", ("no",), _NO_COMPILER
    yield (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ("1",),
        f"train.minibatch_size ({config.train.minibatch_size}) says how much of train.batch_size, which is over all "
        "processes, goes through the model at once. Leave it out.",
    )
    shard, offload = (f"backend.{name} is {getattr(backend, name)}. {SAME}" for name in ("shard", "offload"))
    if given.get("ACCELERATE_USE_FSDP", "").lower() not in OFF:
        yield "FSDP_VERSION", ("2",), "the backend is FSDP2. Leave it out, or set it to 2."
        yield "FSDP_RESHARD_AFTER_FORWARD", (str(backend.shard != "gradients").lower(),), shard
        yield "FSDP_OFFLOAD_PARAMS", (str(backend.offload == "all").lower(),), offload
        recomputed = str(backend.gradient_checkpointing).lower()
        because = f"backend.gradient_checkpointing is {recomputed}. {SAME}"
        yield "FSDP_ACTIVATION_CHECKPOINTING", (recomputed,), because
        blocks = "backend.kind: fsdp divides all weights, block by block as the model names its blocks. Leave it out."
        yield "FSDP_AUTO_WRAP_POLICY", ("transformer_based_wrap",), blocks
        yield "FSDP_IGNORED_MODULES", ("",), blocks
        yield "FSDP_TRANSFORMER_CLS_TO_WRAP", ("",), blocks
    if given.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in OFF:
        stage = {"optimizer": "1", "gradients": "2"}.get(backend.shard, "3")
        yield "ACCELERATE_DEEPSPEED_ZERO_STAGE", (stage,), shard
        moved = {"OPTIMIZER": backend.offload != "none", "PARAM": backend.offload == "all"}
        for part, to_cpu in moved.items():
            yield f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", ("cpu" if to_cpu else "none",), offload
        norms = ("none",) if norm is None else ("none", str(norm), f"{norm:g}")
        yield "ACCELERATE_GRADIENT_CLIPPING", norms, f"train.max_grad_norm is {norm}. {SAME}"
        for name in ("CONFIG_FILE", "MOE_LAYER_CLS_NAMES"):
            unread = "that is not read. Leave it out, and set options of zero_optimization in backend.deepspeed_config."
            yield f"ACCELERATE_DEEPSPEED_{name}", ("none",), unread


def _processes(given: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher says it has started."""
    return next((int(given[name]) for name in SIZES if given.get(name, "").isdecimal()), 1)
