"""Calling the user's functions on what was sampled, such that a failure on one process is a failure on all."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trlx_like.distributed import World
from trlx_like.errors import RewardError
from trlx_like.rewards import call_metric
from trlx_like.rewards.call import Reward
from trlx_like.rewards.runner import FAULTS_FILE, RewardRunner, Scores, Submitted

if TYPE_CHECKING:
    from trlx_like.trainers.base import BaseRLTrainer

T = TypeVar("T")
Row = dict[str, Any]
"""A column a key: what a function may see of a sample. "metadata": the prompt's own keys; "length": response tokens."""


@dataclass
class Batch:
    """Rows of this process that are being scored."""

    function: Callable[..., Any]
    count: int
    submitted: Submitted


class Scoring:
    """The reward functions of a run, each with its runner. All processes have to call its methods equally often."""

    def __init__(self, trainer: BaseRLTrainer[Any]) -> None:
        self.trainer = trainer
        self.tally = Tally()
        self._runners: dict[int, RewardRunner] = {}  # by the id of the function, which they hold
        if trainer.reward_fn is not None:
            self.runner(trainer.reward_fn)  # what is wrong with it is said before a model is loaded

    def runner(self, function: Callable[..., Any]) -> RewardRunner:
        """The runner of a function. ConfigError where it cannot be run as the section `reward` says."""
        if id(function) not in self._runners:
            options, directory = self.trainer.config.reward, self.trainer.run.directory
            rank = self.trainer.world.rank
            self._runners[id(function)] = RewardRunner(function, options, directory=directory, rank=rank)
        return self._runners[id(function)]

    def submit(self, function: Callable[..., Any], rows: Sequence[Row]) -> Batch:
        """Begins to score the rows of this process, or with `train.reward_on_main_process` those of all on the main."""
        world, step = self.trainer.world, self.trainer.progress.step
        on_main = self.trainer.config.train.reward_on_main_process
        seen = world.gather(list(rows)) if on_main else list(rows)
        seen = seen if world.main or not on_main else []
        lengths = [row["length"] for row in seen] if seen and "length" in seen[0] else None
        tokenizer = getattr(self.trainer, "tokenizer", None)
        columns = _columns(seen)
        submitted = self.runner(function).submit(*columns, lengths=lengths, tokenizer=tokenizer, step=step)
        return Batch(function, len(rows), submitted)

    def result(self, batch: Batch) -> Scores:
        """What the rows of this process got. RewardError on every process if one has it."""
        world = self.trainer.world
        scores = _called(world, lambda: self.runner(batch.function).result(batch.submitted))
        if not self.trainer.config.train.reward_on_main_process:
            return scores
        scores = world.broadcast(scores)
        before = sum(world.gather([batch.count])[: world.rank])
        own = slice(before, before + batch.count)
        components = {name: column[own] for name, column in scores.components.items()}
        return Scores(scores.rewards[own], components, scores.faults if world.main else 0)

    def score(self, function: Callable[..., Any], rows: Sequence[Row]) -> Scores:
        """`submit` and `result` in one."""
        return self.result(self.submit(function, rows))

    def measure(self, function: Callable[..., Any], rows: Sequence[Row]) -> Mapping[str, Sequence[Reward]]:
        """Metrics of the rows of this process by name, one number a row, from a metric function.

        What a reward function or a judge says of them (`WinRate.scored`) goes through its runner, and may abstain.
        """
        scored: Mapping[str, Callable[..., Any]] = getattr(function, "scored", {})
        plain = getattr(function, "also", None) if scored else function
        tokenizer = getattr(self.trainer, "tokenizer", None)

        def call() -> dict[str, list[float]]:
            if plain is None or not rows:
                return {}
            metrics = call_metric(plain, *_columns(rows), tokenizer)
            return {name: values * (len(rows) if len(values) == 1 else 1) for name, values in metrics.items()}

        metrics = _called(self.trainer.world, call)
        return {**metrics, **{name: self.score(own, rows).rewards for name, own in scored.items()}}

    def chunks(
        self,
        function: Callable[..., Any],
        count: int,
        size: int,
        make: Callable[[int, int], T | None],
        rows: Callable[[T], list[Row]],
    ) -> Iterator[tuple[T, Scores]]:
        """What `make` makes of this process's share of `count` prompts, chunk by chunk, and what it got.

        size: prompts of a chunk and process. make: called with the first prompt and the number of those of all
        processes; None: this process has none of them. It draws all random numbers of its chunk, since what the caller
        does with one may come before or after the next is made. rows: of what was made, as functions may see it.
        """
        trainer, left = self.trainer, count
        waiting: deque[tuple[T | None, Batch]] = deque()
        try:
            while left > 0 or waiting:
                if left > 0:
                    trainer.check_stop()
                    taken = min(left, size * trainer.world.size)
                    made = make(count - left, taken)
                    with trainer.clock("reward"):
                        waiting.append((made, self.submit(function, [] if made is None else rows(made))))
                    left -= taken
                # Where the reward runs in workers, the next chunks are made meanwhile.
                if left > 0 and len(waiting) <= trainer.config.reward.workers:
                    continue
                made, batch = waiting.popleft()
                with trainer.clock("reward"):
                    scores = self.result(batch)
                self.tally.add(scores)
                if made is not None:
                    yield made, scores
        finally:
            if waiting:  # nobody wants these any more
                self.close()

    def round_metrics(self, *, may_be_empty: bool = False) -> dict[str, float]:
        """Of all that `tally` has counted. RewardError when nothing of it has a reward, unless it may be so."""
        tally = self.total(self.tally)
        if tally.all_abstained and not may_be_empty:
            what = f"reward_fn abstained (None) from all {tally.samples:g} samples{tally.because}"
            raise RewardError(f"{what}; there is nothing to train on.")
        return tally.metrics()

    def total(self, tally: Tally) -> Tally:
        """That of all processes. RewardError on all when more have no reward than `reward.max_abstained` allows."""
        total = Tally(self.trainer.world.sum_by_name(tally.sums))
        total.check(self.trainer.config.reward.max_abstained)
        return total

    def close(self) -> None:
        """Ends the workers of this process, also those that are busy."""
        for runner in self._runners.values():
            runner.close()


class Tally:
    """What came of the samples of a round or an evaluation."""

    def __init__(self, sums: Mapping[str, float] | None = None) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float, sums or {})

    def add(self, scores: Scores) -> Tally:
        self.sums["samples"] += len(scores.rewards)
        self.sums["abstained"] += sum(reward is None for reward in scores.rewards)
        self.sums["faults"] += scores.faults
        for name, column in scores.components.items():
            given = [reward for reward in column if isinstance(reward, float)]
            self.sums[f"sum/{name}"] += sum(given)
            self.sums[f"count/{name}"] += len(given)
        return self

    @property
    def samples(self) -> float:
        return self.sums["samples"]

    @property
    def all_abstained(self) -> bool:
        return self.sums["abstained"] == self.samples

    @property
    def because(self) -> str:
        """Where to read on, when functions failed."""
        return f", after {self.sums['faults']:g} faults ({FAULTS_FILE})" if self.sums["faults"] else ""

    def check(self, limit: float) -> None:
        """RewardError when a larger fraction than the limit abstained."""
        if self.sums["abstained"] > limit * self.samples:
            share = f"{self.sums['abstained']:g} of {self.samples:g} samples have no reward"
            raise RewardError(f"{share}{self.because}; reward.max_abstained is {limit:g}.")

    def metrics(self) -> dict[str, float]:
        """Of a round."""
        share = self.sums["abstained"] / max(self.samples, 1)
        metrics = {"rollout/abstained_fraction": share, "rollout/reward_faults": self.sums["faults"]}
        for key, count in list(self.sums.items()):
            kind, _, name = key.partition("/")
            if kind == "count":
                metrics[f"rollout/reward/{name}/mean"] = self.sums[f"sum/{name}"] / count if count else float("nan")
        return metrics


def _called(world: World, call: Callable[[], T]) -> T:
    """What `call` returns. RewardError on every process if it raises that on one, so that none waits for another."""
    failure, result = None, None
    try:
        result = call()
    except RewardError as error:
        failure = error
    messages = world.gather([None if failure is None else str(failure)])
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RewardError(f"On process {rank}: {message}")
    assert result is not None
    return result


def _columns(rows: Sequence[Row]) -> tuple[Mapping[str, list[Any]], list[dict[str, Any]]]:
    """What a function sees by column, and the metadata of each prompt."""
    names = [name for name in rows[0] if name not in ("metadata", "length")] if rows else []
    return {name: [row[name] for row in rows] for name in names}, [row["metadata"] for row in rows]
