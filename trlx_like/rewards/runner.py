"""The reward runner: what every reward of a run goes through, whoever computes it and whatever goes wrong with it.

A batch is a call of each function that the reward is made of, or with `reward.sample_time_limit` one for each sample.
The calls are made in this process, or in processes of their own (`reward.workers`) while this one goes on. What fails
is a `Fault`: it is written to reward_faults.jsonl, and `reward.on_error` says what becomes of its samples.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from trlx_like.config import RewardFnConfig
from trlx_like.rewards.call import Call, Fault, Given, Outcome, Reward, is_picture, run
from trlx_like.rewards.limits import Deadline, check_alarm
from trlx_like.rewards.pool import Answer, Pool, check_workers
from trlx_like.rewards.weighted import WeightedRewards, parts_of
from trlx_like.rewards.worker import Job

logger = logging.getLogger(__name__)

FAULTS_FILE = "reward_faults.jsonl"
OUTPUT_FILE = "reward_output.log"
"""In the run folder: what functions print that run in workers."""


@dataclass
class Scores:
    """What a batch got."""

    rewards: list[Reward]  # one a sample; None: all abstained
    components: dict[str, list[Reward]] = field(default_factory=dict)  # of several functions, by their names
    faults: int = 0


@dataclass
class Submitted:
    """A batch that is being scored, or will be when its result is asked for."""

    count: int
    calls: list[Call]
    places: list[tuple[str, range]]  # of each call: the function's name, and the samples' places in the batch
    answers: list[tuple[Answer, list[int]]]  # from workers, with the places of their calls
    tokenizer: Any
    step: int


class RewardRunner:
    """Scores batches with a reward function, as the section `reward` of the configuration says.

    function: one, or `WeightedRewards`. Functions are called with keywords, those that they take of a batch's columns,
    `tokenizer` and the prompts' keys; one with an attribute `group_size` is called with groups of so many samples.
    directory: the run folder, for the record of faults. rank: of this process, for the same.

    ConfigError for what cannot run so: a function that cannot be sent to workers, a time limit that cannot be kept.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: RewardFnConfig | None = None,
        *,
        directory: Path | None = None,
        rank: int = 0,
    ) -> None:
        self.function = function
        self.parts = parts_of(function)
        self.options = RewardFnConfig() if options is None else options
        self.directory, self.rank = directory, rank
        self._pool: Pool | None = None
        if self.options.workers:
            check_workers(list(self.parts.values()), self.options.worker_memory)
        elif self.options.time_limit is not None or self.options.sample_time_limit is not None:
            check_alarm()

    def submit(
        self,
        given: Given,
        metadata: Sequence[Mapping[str, Any]],
        *,
        lengths: Sequence[int] | None = None,
        tokenizer: Any = None,
        step: int = 0,
    ) -> Submitted:
        """Begins to score a batch where there are workers; without, that is left to `result`.

        given: columns of the batch, a list with one entry a sample each ("samples", "prompts", "outputs" of text;
        "images", "prompts"). metadata: of each prompt. lengths: response tokens of each sample.
        """
        count = len(metadata)
        batch = Submitted(count, [], [], [], tokenizer, step)
        for name, function in self.parts.items():
            deadline = Deadline(self.options.time_limit, self.options.sample_time_limit)
            for rows in self._cut(function, count):
                part = {column: [values[row] for row in rows] for column, values in given.items()}
                of_rows = None if lengths is None else [lengths[row] for row in rows]
                call = Call(function, part, [metadata[row] for row in rows], of_rows, deadline.begin)
                batch.calls.append(call)
                batch.places.append((name, rows))
        if self.options.workers and count:
            self._send(batch)
        return batch

    def result(self, batch: Submitted) -> Scores:
        """What a batch got. RewardError for a fault if `reward.on_error` is raise."""
        outcomes: list[list[Outcome]] = [[] for _ in batch.calls]
        if not self.options.workers:
            outcomes = run(batch.calls, batch.tokenizer)
        for answer, places in batch.answers:
            for place, of_call in zip(places, answer.result(), strict=True):
                outcomes[place] = of_call
        columns: dict[str, list[Outcome]] = {name: [None] * batch.count for name in self.parts}
        for (name, rows), of_call in zip(batch.places, outcomes, strict=True):
            columns[name][rows.start : rows.stop] = of_call
        faults = self._record(batch, outcomes)
        if faults and self.options.on_error == "raise":
            raise faults[0].error(self._see_also(faults[0]))
        rewards = {name: [self._in_place_of(outcome) for outcome in column] for name, column in columns.items()}
        if isinstance(self.function, WeightedRewards):
            return Scores(self.function.combined(list(rewards.values())), rewards, len(faults))
        return Scores(next(iter(rewards.values())), {}, len(faults))

    def score(self, given: Given, metadata: Sequence[Mapping[str, Any]], **more: Any) -> Scores:
        """`submit` and `result` in one."""
        return self.result(self.submit(given, metadata, **more))

    def close(self) -> None:
        """Ends the workers, also those that are busy; they are started again when they are needed."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _cut(self, function: Callable[..., Any], count: int) -> list[range]:
        """The rows of a batch as each of a function's calls has them."""
        size = max(count, 1) if self.options.sample_time_limit is None else getattr(function, "group_size", 1)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _send(self, batch: Submitted) -> None:
        """Jobs for the workers: a call each, but all async calls in one, where they are awaited together."""
        functions = list(self.parts.values())
        if self._pool is None:
            self._pool = Pool(
                functions,
                self.options.workers,
                tokenizer=batch.tokenizer,
                start_limit=self.options.worker_start_limit,
                memory=self.options.worker_memory,
                log=None if self.directory is None else self.directory / OUTPUT_FILE,
            )
        alone: list[int] = []
        together: list[int] = []
        for place, call in enumerate(batch.calls):
            (together if _is_async(call.function) else alone).append(place)
        of_name = {name: place for place, name in enumerate(self.parts)}
        for places in [*([place] for place in alone), *([together] if together else [])]:
            job = Job([batch.calls[place] for place in places], [of_name[batch.places[place][0]] for place in places])
            batch.answers.append((self._pool.submit(job), places))

    def _see_also(self, fault: Fault) -> str:
        """Where the traceback is, where the exception that has it is in a worker."""
        elsewhere = fault.traceback and fault.cause is None and self.directory is not None
        return f"\n  traceback: in {self.directory}/{FAULTS_FILE}" if elsewhere else ""

    def _in_place_of(self, outcome: Outcome) -> Reward:
        if not isinstance(outcome, Fault):
            return outcome
        return None if self.options.on_error == "abstain" else self.options.error_value

    def _record(self, batch: Submitted, outcomes: Sequence[Sequence[Outcome]]) -> list[Fault]:
        """Writes the faults of a batch; returns them."""
        found: dict[Fault, tuple[Call, list[int]]] = {}
        for call, of_call in zip(batch.calls, outcomes, strict=True):
            for row, outcome in enumerate(of_call):
                if isinstance(outcome, Fault):
                    found.setdefault(outcome, (call, []))[1].append(row)
        if found and self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            lines = [self._line(fault, call, rows, batch.step) for fault, (call, rows) in found.items()]
            with (self.directory / FAULTS_FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(lines))
        if found and self.options.on_error != "raise":
            first = next(iter(found))
            more = f" and {len(found) - 1} more faults" if len(found) > 1 else ""
            logger.warning("%s%s: see %s.", first.message[:300], more, FAULTS_FILE)
        return list(found)

    def _line(self, fault: Fault, call: Call, rows: Sequence[int], step: int) -> str:
        columns = {name: [values[row] for row in rows] for name, values in call.given.items() if name != "samples"}
        line = {
            "step": step,
            "rank": self.rank,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "function": fault.function,
            "kind": fault.kind,
            "message": fault.message,
            "traceback": fault.traceback,
            "count": len(rows),
            **columns,
            "metadata": [call.metadata[row] for row in rows],
        }
        return json.dumps({name: _plain(value) for name, value in line.items()}, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """The value as JSON has it; what that cannot have in words."""
    try:
        return json.loads(json.dumps(value, default=_in_words, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)


def _in_words(value: Any) -> str:
    """What an image is, not its pixels; all else as Python writes it."""
    if is_picture(value):
        return f"an image of {value.width} x {value.height} pixels, {value.mode}"
    if type(value).__module__ == "torch" and hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _is_async(function: Callable[..., Any]) -> bool:
    inner = getattr(function, "func", function)
    return iscoroutinefunction(inner) or iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
