"""Make the Accelerator, and start several processes on one machine."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from accelerate import Accelerator

from trlx_like.config import BackendConfig
from trlx_like.distributed.orphans import VARIABLE, watch_launcher
from trlx_like.errors import ConfigError

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that the other processes get to end by themselves after one has failed."""

STOPPED = (130, 143)
"""Exit codes of processes that saved and ended because of a signal."""


def make_accelerator(backend: BackendConfig) -> Accelerator:
    """Make the Accelerator of this process from the section `backend`.

    Without a GPU the CPU is requested explicitly. Otherwise accelerate would treat each of several processes as the
    only one.

    Raises:
        ConfigError: If `backend.mixed_precision` is not available.
    """
    watch_launcher()
    if backend.num_threads is not None:
        torch.set_num_threads(backend.num_threads)
    on_cpu = backend.device == "cpu" or not torch.cuda.is_available()  # Apple's GPUs lack float64, which sums are in
    try:
        accelerator = Accelerator(cpu=on_cpu, mixed_precision=backend.mixed_precision)
    except ValueError as error:  # accelerate remembers the first number format of a process
        raise ConfigError(f"backend.mixed_precision ({backend.mixed_precision!r}): {error}") from error
    if on_cpu and accelerator.mixed_precision == "fp16":
        # accelerate would silently train in the number format of the weights.
        logger.warning(
            "backend.mixed_precision: fp16 is slow on a CPU, where bf16 does the same. Gradients are scaled."
        )
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def launch(command: Sequence[str], processes: int) -> int:
    """Run `python <command>` as a distributed run on this machine, and return its exit code.

    Signals to this process are forwarded to all processes of the run, and it waits until they have saved. When a
    process fails, the others have `PATIENCE` seconds to end by themselves before they are killed. When this process
    is killed, they save and end.

    Args:
        command: Arguments of the Python interpreter.
        processes: Number of processes.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    children: list[subprocess.Popen[bytes]] = []
    with _passed_on(children), _life_line() as (handles, variables):
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            # In a session of their own, or a Ctrl-C of the terminal would reach them twice: stop at once, do not save.
            child = subprocess.Popen(
                [sys.executable, *command],
                env={**environment, **own, **variables},
                start_new_session=True,
                pass_fds=handles,
            )
            children.append(child)
        return _wait(children)


@contextmanager
def _life_line() -> Iterator[tuple[tuple[int, ...], dict[str, str]]]:
    """Hold a pipe open whose end tells children that this process is gone; yield the handles and variables for them."""
    if os.name == "nt":  # it cannot pass handles on
        yield (), {}
        return
    reading, writing = os.pipe()
    try:
        yield (reading,), {VARIABLE: str(reading)}
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def _passed_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forward signals that would end this process to the children, within a `with` block."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None and (os.name != "nt" or number != signal.SIGINT):  # Windows has no sessions
                child.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait; return the exit code of the first process that failed, else of one stopped by a signal, else 0."""
    failed, since = 0, 0.0
    while running := [child for child in children if child.poll() is None]:
        if not failed:
            failed, since = _failure(children), time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            for child in running:
                child.kill()
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=0.2)
    return failed or _failure(children) or max(child.returncode for child in children)


def _failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit code of a process that failed (not 0, and not stopped by a signal); 0 without one."""
    ended = [child.returncode for child in children if child.returncode is not None]
    return next((code for code in ended if code not in (0, *STOPPED)), 0)


def free_port() -> int:
    """Find a port that nothing listens on, below the range that systems assign automatically.

    A port of that range (32768 and up on Linux) could be assigned to another process before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
