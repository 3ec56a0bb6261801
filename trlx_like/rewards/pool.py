"""The processes of `reward.workers`: jobs in, futures out."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trlx_like.errors import ConfigError
from trlx_like.rewards.call import Outcome, name_of, parameters
from trlx_like.rewards.worker import Job, Payload, Worker

Answer = Future[list[list[Outcome]]]


class Pool:
    """Workers, each held by a thread that hands it one job after the other.

    functions: what jobs call, by their place. tokenizer: goes to each worker once, if a function takes one. memory: MiB
    of a worker. log: a file for what functions print. ConfigError for what cannot be sent to another process.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        workers: int,
        *,
        tokenizer: Any = None,
        start_limit: float = 300.0,
        memory: int | None = None,
        log: Path | None = None,
    ) -> None:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        known = tokenizer if any(_takes_tokenizer(function) for function in functions) else None
        payload = Payload(packed(functions), _packed(known, "the tokenizer"), start_limit, memory, log)
        self._jobs: SimpleQueue[tuple[Answer, Job] | None] = SimpleQueue()
        self._workers = [Worker(payload) for _ in range(workers)]
        self._threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Answer:
        """An outcome a sample of each call, when they are known."""
        answer: Answer = Future()
        self._jobs.put((answer, job))
        return answer

    def close(self) -> None:
        """Ends the processes, also those that are busy, and drops what is left to do."""
        while not self._jobs.empty():
            self._jobs.get()
        for worker in self._workers:
            self._jobs.put(None)
            worker.stop()
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: Worker) -> None:
        while (item := self._jobs.get()) is not None:
            answer, job = item
            try:
                answer.set_result(worker.run(job))
            except BaseException as error:  # the thread that waits for the answer raises it
                answer.set_exception(error)
        worker.close()


def check_workers(functions: Sequence[Callable[..., Any]], memory: int | None) -> None:
    """ConfigError for what cannot be done with workers here."""
    if sys.platform == "win32":
        raise ConfigError("reward.workers needs a Unix system; set it to 0.")
    if memory is not None and not Path("/proc/self/statm").exists():
        raise ConfigError(f"reward.worker_memory ({memory}) can be watched on Linux only; set it to null.")
    packed(functions)


def packed(functions: Sequence[Callable[..., Any]]) -> bytes:
    """The functions as another process can read them."""
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


def _takes_tokenizer(function: Callable[..., Any]) -> bool:
    names, _, everything = parameters(function)
    return everything or "tokenizer" in names
