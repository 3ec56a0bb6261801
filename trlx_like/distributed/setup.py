"""The Accelerator, and several processes on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from trlx_like.config import BackendConfig


def make_accelerator(backend: BackendConfig) -> Accelerator:
    """The Accelerator of this process.

    Without a GPU the CPU is asked for by name: otherwise several processes that were started to work together each
    believe that they are alone.
    """
    if backend.num_threads is not None:
        torch.set_num_threads(backend.num_threads)
    on_cpu = backend.device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return Accelerator(cpu=on_cpu, mixed_precision=backend.mixed_precision)


def launch(command: Sequence[str], processes: int) -> int:
    """Runs `python command...` in `processes` processes that know of each other; returns the exit code.

    Signals reach the processes from the terminal's group; the launcher waits until they have saved.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)},
        )
        for rank in range(processes)
    ]
    return _wait(children)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first exit code that is not 0. When one process fails the others, which would wait for it, are ended."""
    code = 0
    running = list(children)
    while running:
        try:
            for child in list(running):
                if child.poll() is None:
                    continue
                running.remove(child)
                if child.returncode != 0 and code == 0:
                    code = child.returncode
                    for other in running:
                        other.terminate()
            if running:
                _pause(running[0])
        except KeyboardInterrupt:
            continue  # Ctrl-C went to the children too; they save, then end
    return code


def _pause(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
