"""The worker processes of `reward.workers`, which take jobs and answer with futures."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trlx_like.config import RewardFnConfig
from trlx_like.errors import ConfigError
from trlx_like.rewards.arguments import name_of, parameters
from trlx_like.rewards.outcome import Outcome
from trlx_like.rewards.worker import Job, Payload, Worker

Outcomes = Future[list[list[Outcome]]]
"""The future outcomes of a job: for each of its calls, one outcome per sample."""


class Pool:
    """Run jobs in worker processes, each of which is fed by a thread of this process.

    Args:
        functions: The functions that jobs call; jobs name them by their place in this list.
        options: How many processes to run, and their limits.
        tokenizer: Sent to each worker once, if a function accepts it.
        log: File for what functions print; None: discard it.

    Raises:
        ConfigError: A function or the tokenizer cannot be sent to another process.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], options: RewardFnConfig, tokenizer: Any, log: Path | None
    ) -> None:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        if not any(takes_all or "tokenizer" in names for names, _, takes_all in map(parameters, functions)):
            tokenizer = None
        known, limits = _packed(tokenizer, "the tokenizer"), (options.worker_start_limit, options.worker_memory)
        payload = Payload(packed(functions), known, *limits, log)
        self._jobs: SimpleQueue[tuple[Outcomes, Job] | None] = SimpleQueue()
        self._workers = [Worker(payload) for _ in range(options.workers)]
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Outcomes:
        """Queue a job for the next free worker."""
        answer: Outcomes = Future()
        self._jobs.put((answer, job))
        return answer

    def close(self) -> None:
        """End the processes, busy ones too, and drop the jobs that are left."""
        while not self._jobs.empty():
            self._jobs.get()
        for worker in self._workers:
            self._jobs.put(None)
            worker.stop()
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: Worker) -> None:
        """Give a worker one job after the other."""
        while (item := self._jobs.get()) is not None:
            answer, job = item
            try:
                answer.set_result(worker.run(job))
            except BaseException as error:  # the thread that waits for the answer raises it
                answer.set_exception(error)
        worker.close()


def check_workers(functions: Sequence[Callable[..., Any]], memory: int | None) -> None:
    """Raise ConfigError if this system has no workers, or a function cannot be sent to one."""
    if sys.platform == "win32":
        raise ConfigError("reward.workers needs a Unix system; set it to 0.")
    if memory is not None and not Path("/proc/self/statm").exists():
        raise ConfigError(f"reward.worker_memory ({memory}) can be watched on Linux only; set it to null.")
    packed(functions)


def packed(functions: Sequence[Callable[..., Any]]) -> bytes:
    """Pickle functions for another process.

    Raises:
        ConfigError: If a function cannot be pickled; it names the function.
    """
    for function in functions:
        _packed(function, name_of(function))
    return pickle.dumps(list(functions))


def _packed(value: Any, name: str) -> bytes:
    module = getattr(value, "__module__", None) if callable(value) else None
    interactive = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    try:
        if interactive:
            raise pickle.PicklingError("it is defined in an interactive session")
        return pickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"reward.workers: {name} cannot be sent to another process ({error}). Define it at the top level of a "
            "module or script, not as a lambda or within another function, or name it as module:function or "
            "file.py:function; or set reward.workers to 0."
        ) from error
