"""Several processes that know of each other, forked from a test: a start costs a tenth of a second, not ten."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import distributed as dist

from trlx_like.distributed.launcher import free_port


def on_ranks(
    function: Callable[..., Any], *args: Any, processes: int = 2, timeout: float = 120, exits: bool = False
) -> list[Any]:
    """Call `function(rank, *args)` on several processes of one group, and return the result of each.

    Linux and macOS only. Torch is set to one thread, because a process that has started threads cannot be forked.

    Args:
        function: Called on every process; what it returns is pickled.
        args: Further arguments of the function.
        processes: Number of processes.
        timeout: Seconds within which all have to end.
        exits: Return the exit code in place of the result for a process that ends with SystemExit.

    Raises:
        AssertionError: If a process raises, dies or does not end in time.
    """
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("fork")
    children, pipes = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        variables = {**address, "WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        child = context.Process(target=_run, args=(sender, variables, function, rank, *args), daemon=True)
        child.start()
        sender.close()
        children.append(child)
        pipes.append(receiver)
    try:
        outcomes = _gather(pipes, time.monotonic() + timeout)
    finally:
        for child in children:
            child.join(timeout=5 if child.exitcode is None else None)
            child.kill()
    failed = [f"rank {rank} {kind}:\n{value}" for rank, (kind, value) in enumerate(outcomes) if kind != "returned"]
    if failed and not (exits and all(kind in ("returned", "exited") for kind, _ in outcomes)):
        raise AssertionError("\n".join(failed))
    return [value for _, value in outcomes]


def _gather(pipes: list[Connection], deadline: float) -> list[tuple[str, Any]]:
    outcomes: dict[int, tuple[str, Any]] = {}
    while len(outcomes) < len(pipes) and time.monotonic() < deadline:
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
        for pipe in wait(list(left), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            try:
                outcomes[left[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[left[pipe]] = ("died", "")
    return [outcomes.get(rank, ("hung", "")) for rank in range(len(pipes))]


def _run(sender: Connection, variables: dict[str, str], function: Callable[..., Any], *args: Any) -> None:
    os.environ.update(variables)
    AcceleratorState._reset_state(reset_partial_state=True)  # the test's own process is alone
    GradientState._reset_state()
    try:
        outcome = ("returned", function(*args))
    except SystemExit as stopped:
        outcome = ("exited", stopped.code)
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    if dist.is_initialized() and outcome[0] != "failed":
        dist.destroy_process_group()


class OnFirst:
    """A reward function that abstains on every process but the first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, **columns: Any) -> list[Any]:
        if torch.distributed.get_rank():
            return [None] * len(columns["outputs"])
        return list(self.function(**columns))
