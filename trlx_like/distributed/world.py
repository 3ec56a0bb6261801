"""Collective operations between the processes of a run. With one process they return their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed as dist

from trlx_like.errors import ConfigError, TrlxError
from trlx_like.functional.masked import combine_stats, masked_stats, unbiased_variance

T = TypeVar("T")


@dataclass(frozen=True)
class Statistics:
    """Hold count, mean and spread of numbers from all processes."""

    count: float
    mean: float
    m2: float
    """Sum of squared distances from the mean."""

    @property
    def var(self) -> float:
        """Variance with n - 1 in the denominator; 0 for fewer than two numbers."""
        return float(unbiased_variance(torch.tensor(self.count), torch.tensor(self.m2)))

    @property
    def std(self) -> float:
        """Standard deviation, the square root of `var`."""
        return float(self.var**0.5)


class World:
    """Communicate between the processes of a run. All of them must call the methods in the same order.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        main: Whether this process has rank 0.
        waiting: Whether this process is in a collective operation, where it waits for the others.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.size: int = accelerator.num_processes
        self.main: bool = self.rank == 0
        self.waiting = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Mark a `with` block as a collective operation."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def sum(self, values: Iterable[float]) -> list[float]:
        """Sum numbers over processes, in float64."""
        given = list(values)
        if self.size == 1:
            return given
        total = torch.tensor(given, dtype=torch.float64, device=self.accelerator.device)
        with self.meeting():
            dist.all_reduce(total)
        return [float(value) for value in total]

    def statistics(self, values: Tensor, mask: Tensor) -> Statistics:
        """Return count, mean and spread of masked values over all processes.

        Args:
            values: The values. [*]
            mask: True for the values to count; it may be False everywhere on a process. [*] bool
        """
        own = torch.stack(masked_stats(values.double(), mask)).tolist()
        merged = combine_stats(torch.tensor(self.gather([own]), dtype=torch.float64))
        return Statistics(*(float(value) for value in merged))

    def part(self, total: int, name: str) -> int:
        """Divide a global number evenly over the processes.

        Args:
            total: The number over all processes.
            name: The option that it comes from, for the error.

        Raises:
            ConfigError: If `total` is not a multiple of the number of processes.
        """
        if total % self.size:
            raise ConfigError(
                f"{name} ({total}) is over all processes and must be a multiple of their number ({self.size})."
            )
        return total // self.size

    def max(self, value: int) -> int:
        """Return the largest value of all processes."""
        return max(self.gather([value]))

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes on every process, concatenated in the order of ranks."""
        if self.size == 1:
            return items
        with self.meeting():
            return list(gather_object(items))

    def broadcast(self, item: T) -> T:
        """Return the item of rank 0 on every process."""
        if self.size == 1:
            return item
        held: list[Any] = [item]
        with self.meeting():
            broadcast_object_list(held, from_process=0)
        result: T = held[0]
        return result

    def on_main(self, action: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on every process.

        Args:
            action: The function. If it raises a TrlxError on rank 0, the other processes exit with the same exit code
                and without a message, so that the error is shown once.
        """
        result: Any = None
        error: TrlxError | None = None
        if self.main:
            try:
                result = action()
            except TrlxError as raised:
                error = raised
        result, code = self.broadcast((result, None if error is None else error.exit_code))
        if error is not None:
            raise error
        if code is not None:
            raise SystemExit(code)
        given: T = result
        return given

    def share(self, items: list[T]) -> list[T]:
        """Return this process's part of a list that every process holds: each `size`-th item from `rank` on."""
        return items[self.rank :: self.size]

    def join(self, parts: list[T]) -> list[T]:
        """Invert `share`: return the whole list in its original order on every process."""
        if self.size == 1:
            return parts
        shares = self.gather([parts])
        longest = max(len(part) for part in shares)
        return [part[row] for row in range(longest) for part in shares if row < len(part)]

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        with self.meeting():
            self.accelerator.wait_for_everyone()

    def same_weights(self, parameters: Iterable[Tensor]) -> None:
        """Copy the weights of rank 0 to every process, in place."""
        if self.size > 1:
            with self.meeting():
                for parameter in parameters:
                    dist.broadcast(parameter.data, src=0)
