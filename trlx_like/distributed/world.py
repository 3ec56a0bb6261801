"""Collective operations between the processes of a run. With one process they return their input."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, distributed as dist, nn

from trlx_like.errors import TrlxError, another_failed
from trlx_like.functional.masked import combine_stats, masked_stats, unbiased_variance
from trlx_like.functional.parts import Unread

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


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
        before_meeting: Called before each collective operation, if a backend has something to end before.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.size: int = accelerator.num_processes
        self.main: bool = self.rank == 0
        self.waiting = False
        self.before_meeting: Callable[[], None] | None = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Mark a `with` block as a collective operation."""
        if self.before_meeting is not None:
            self.before_meeting()
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
        merged = combine_stats(torch.tensor(self.rows(own), dtype=torch.float64))
        return Statistics(*(float(value) for value in merged))

    def max(self, value: int) -> int:
        """Return the largest value of all processes."""
        return max(int(row[0]) for row in self.rows([value]))

    def rows(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, in the order of ranks. They travel as one tensor, in float64.

        Args:
            numbers: The numbers of this process, equally many on every process.
        """
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
        every = own.new_empty(self.size, len(own))
        with self.meeting():
            dist.all_gather(list(every), own)
        found: list[list[float]] = every.tolist()
        return found

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes on every process, concatenated in the order of ranks."""
        with self.meeting():
            return list(gather_object(items))

    def broadcast(self, item: T) -> T:
        """Return the item of rank 0 on every process."""
        held = [item]
        with self.meeting():
            broadcast_object_list(held, from_process=0)
        return held[0]

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
        return cast(T, result)

    def all_or_none(self, action: Callable[[], None], place: Path) -> None:
        """Run an action on every process, and raise on all of them if it fails on one.

        Args:
            action: The action. It communicates with other processes before all that may fail, or not at all.
            place: The file or folder that it writes, for the error of the processes on which it did not fail.

        Raises:
            CheckpointError: If it failed on another process.
        """
        self.together(action, Exception, elsewhere=lambda _: another_failed(place))

    def together(
        self,
        action: Callable[[], T],
        *kinds: type[Exception],
        elsewhere: Callable[[Exception], Exception] = lambda error: error,
    ) -> T:
        """Call a function on every process, and raise on all of them if it fails on one.

        Args:
            action: The function. A process on which it fails raises its error.
            kinds: The errors that count as a failure. Others are raised at once, and the other processes wait.
            elsewhere: Makes the error of the other processes from an error of the first kind that fits, whose message
                names the first process that failed.
        """
        result: Any = None
        failure: Exception | None = None
        own: tuple[int, str] | None = None
        try:
            result = action()
        except kinds as error:
            failure = error
            own = next(place for place, kind in enumerate(kinds) if isinstance(error, kind)), str(error)
        for rank, found in enumerate(self.gather([own])):
            if found is not None:
                raise failure or elsewhere(kinds[found[0]](f"On process {rank}: {found[1]}"))
        return cast(T, result)

    def share(self, items: list[T]) -> list[T]:
        """Return this process's part of a list that every process holds: each `size`-th item from `rank` on."""
        return items[self.rank :: self.size]

    def join(self, parts: list[T]) -> list[T]:
        """Invert `share`: return the whole list in its original order on every process."""
        shares = self.gather([parts])
        longest = max(len(part) for part in shares)
        return [part[row] for row in range(longest) for part in shares if row < len(part)]

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        with self.meeting():
            self.accelerator.wait_for_everyone()

    def place(self, module: nn.Module) -> None:
        """Bring a module to the device of each process, with the weights of rank 0.

        A module with weights that are still in files is left to `Backend.prepare`.
        """
        if not any(isinstance(weight, Unread) for weight in module.parameters()):
            module.to(self.accelerator.device)
            self.same_weights([*module.parameters(), *module.buffers()])

    def same_weights(self, parameters: Iterable[Tensor]) -> None:
        """Copy the weights of rank 0 to every process, in place."""
        if self.size > 1:
            with self.meeting():
                for parameter in parameters:
                    dist.broadcast(parameter.data, src=0)


class NamedNumbers(Generic[K]):
    """Exchange numbers with names between processes, as one tensor each time.

    The names are exchanged only when one is new to the process that has it.

    Args:
        world: The processes of the run.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.names: list[K] = []

    def exchange(self, own: Mapping[K, float]) -> list[dict[K, float]]:
        """Return the numbers of every process by name, in the order of ranks. A process may lack names of others.

        Args:
            own: The numbers of this process.
        """
        if self.world.size == 1:
            return [dict(own)]
        rows = self._rows(own)
        if any(row[0] for row in rows):
            new = (name for names in self.world.gather([list(own)]) for name in names)
            self.names = list(dict.fromkeys([*self.names, *new]))
            rows = self._rows(own)
        size = len(self.names)
        return [
            {
                name: value
                for name, has, value in zip(self.names, row[1 : size + 1], row[size + 1 :], strict=True)
                if has
            }
            for row in rows
        ]

    def _rows(self, own: Mapping[K, float]) -> list[list[float]]:
        """Gather for each process: whether it has a new name, which of the known names it has, and their numbers."""
        has = [float(name in own) for name in self.names]
        return self.world.rows([float(len(own) > sum(has)), *has, *(own.get(name, 0.0) for name in self.names)])
