"""Make the Accelerator of a process."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, patch_environment

from trlx_like.config import TRLConfig
from trlx_like.distributed.launched import check_launcher, check_state
from trlx_like.distributed.orphans import watch_launcher
from trlx_like.errors import ConfigError, raised_as

logger = logging.getLogger(__name__)

NOT_ACCELERATE = {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}
"""What the launcher may ask for, and `Backend` does in place of accelerate."""
MARGIN = 60.0
"""Seconds by which collective operations wait longer than `backend.timeout`."""
KEPT = 2**30
"""Bytes up to which a freed block of memory stays with the process."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of options of `mallopt` in glibc."""


def make_accelerator(config: TRLConfig) -> Accelerator:
    """Make the Accelerator of this process from the section `backend`.

    Without a GPU the CPU is requested explicitly. Otherwise accelerate would treat each of several processes as the
    only one.

    Raises:
        ConfigError: If `backend.mixed_precision` is not available, or the launcher asks for what the configuration does
            not say.
    """
    backend = config.backend
    check_launcher(config)
    # Or transformers would load the weights on one process only.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    watch_launcher()
    if backend.num_threads is not None:
        torch.set_num_threads(backend.num_threads)
    on_cpu = backend.device == "cpu" or not torch.cuda.is_available()  # Apple's GPUs lack float64, which sums are in
    if on_cpu:
        keep_freed_memory()
    # Accelerate remembers the first number format of a process.
    named = raised_as(ConfigError, ValueError, f"backend.mixed_precision ({backend.mixed_precision!r})")
    with named, patch_environment(**NOT_ACCELERATE):
        accelerator = Accelerator(
            cpu=on_cpu, mixed_precision=backend.mixed_precision, kwargs_handlers=_process_group(backend.timeout)
        )
    check_state(config, accelerator.state)
    if on_cpu:  # several processes call it "cpu:0", to which `Tensor.to` copies what is on "cpu" already
        accelerator.state.device = torch.device("cpu")
    if on_cpu and accelerator.mixed_precision == "fp16":
        # accelerate would silently train in the number format of the weights.
        logger.warning(
            "backend.mixed_precision: fp16 is slow on a CPU, where bf16 does the same. Gradients are scaled."
        )
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed tensors, on systems with glibc.

    Otherwise glibc returns large blocks to the system at once, which clears each of their pages before the next step
    may have them again: about 15 % of the CPU time of a step of SFT with 1.8M or of DPO with 124M weights. The
    environment variables of glibc (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`) take precedence.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            set_option(option, KEPT)


def _process_group(timeout: float | None) -> list[InitProcessGroupKwargs]:
    """Return the options of the process group: a timeout that lets the heartbeat name the process at fault first."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return []
    return [InitProcessGroupKwargs(timeout=timedelta(seconds=timeout + MARGIN) if timeout else timedelta(days=365))]
