"""The reward runner, which computes every reward of a run.

Each function that the reward is made of is called once per batch, or with `reward.sample_time_limit` once per sample.
The calls are made in this process, or in worker processes (`reward.workers`) while this one goes on. A failure is a
`Fault`: it is written to reward_faults.jsonl, and `reward.on_error` decides what happens to its samples.
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
from trlx_like.errors import writing
from trlx_like.rewards.arguments import Columns, is_picture
from trlx_like.rewards.call import run_calls
from trlx_like.rewards.checks import aligned
from trlx_like.rewards.limits import Deadline, check_alarm
from trlx_like.rewards.outcome import Call, Fault, Outcome, Reward
from trlx_like.rewards.pool import Outcomes, Pool, check_workers
from trlx_like.rewards.weighted import WeightedRewards, parts_of

logger = logging.getLogger(__name__)

FAULTS_FILE = "reward_faults.jsonl"
OUTPUT_FILE = "reward_output.log"
"""File in the run folder for the output of functions that run in workers."""


@dataclass
class Scores:
    """Hold the rewards of a batch."""

    rewards: list[Reward]  # one per sample; None: all functions abstained
    components: dict[str, list[Reward]] = field(default_factory=dict)  # of each of several functions, by name
    faults: int = 0


@dataclass
class Submitted:
    """Hold a batch whose calls run in workers, or will be made when its result is requested."""

    count: int
    calls: list[Call]
    places: list[tuple[str, range]]  # of each call: the function's name, and its rows of the batch
    answers: list[tuple[Outcomes, list[int]]]  # of workers, each with the places of its calls in `calls`
    tokenizer: Any
    step: int
    ids: Sequence[Sequence[int]] | None = None  # the sampled tokens of each response


class RewardRunner:
    """Score batches with a reward function, as the section `reward` of the configuration says.

    A function gets the keywords that it accepts among the batch's columns, `tokenizer` and the prompts' own keys.

    Args:
        function: A reward function or `WeightedRewards`. With `reward.sample_time_limit`, a function that has an
            attribute `group_size` is called with that many samples at a time instead of one.
        options: The section `reward` of the configuration.
        directory: The run folder, where faults are recorded; None: no record.
        rank: The rank of this process, for the record.

    Raises:
        ConfigError: A function cannot be sent to workers, or a time limit cannot be enforced.
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
        columns: Columns,
        metadata: Sequence[Mapping[str, Any]],
        *,
        lengths: Sequence[int] | None = None,
        ids: Sequence[Sequence[int]] | None = None,
        tokenizer: Any = None,
        step: int = 0,
    ) -> Submitted:
        """Start to score a batch in the workers; without workers the work is left to `result`.

        Args:
            columns: "samples", "prompts" and "outputs" of text, or "images" and "prompts"; each a list with one entry
                per sample.
            metadata: The further keys of each prompt.
            lengths: Response tokens of each sample; None: unknown.
            ids: The sampled tokens of each response, to which rewards of its parts are aligned; None: they are as
                many as the tokens at most, and taken from the first token on.
            tokenizer: Passed to the functions that accept it.
            step: The step of the run, for the record of faults.

        Returns:
            The batch, to be given to `result`.
        """
        count = len(metadata)
        batch = Submitted(count, [], [], [], tokenizer, step, ids)
        lengths = None if ids is not None else lengths
        for name, function in self.parts.items():
            deadline = Deadline(self.options.time_limit, self.options.sample_time_limit)
            for rows in self._cut(function, count):
                own = slice(rows.start, rows.stop)
                part = {column: values[own] for column, values in columns.items()}
                part_lengths = None if lengths is None else lengths[own]
                batch.calls.append(Call(function, part, metadata[own], part_lengths, deadline.begin))
                batch.places.append((name, rows))
        if self.options.workers and count:
            self._send(batch)
        return batch

    def result(self, batch: Submitted) -> Scores:
        """Return the rewards of a batch, waiting for them or computing them now.

        Raises:
            RewardError: There is a fault, and `reward.on_error` is raise.
        """
        outcomes: list[list[Outcome]] = [[] for _ in batch.calls]
        if not self.options.workers:
            outcomes = run_calls(batch.calls, batch.tokenizer)
        for answer, places in batch.answers:
            for place, of_call in zip(places, answer.result(), strict=True):
                outcomes[place] = of_call
        if (ids := batch.ids) is not None:
            pairs = zip(batch.calls, outcomes, batch.places, strict=True)
            outcomes = [aligned(call, of, ids[r.start : r.stop], batch.tokenizer) for call, of, (_, r) in pairs]
        components: dict[str, list[Outcome]] = {name: [None] * batch.count for name in self.parts}
        for (name, rows), of_call in zip(batch.places, outcomes, strict=True):
            components[name][rows.start : rows.stop] = of_call
        faults = self._record(batch, outcomes)
        if faults and self.options.on_error == "raise":
            # An exception that carries its traceback may have stayed in a worker.
            elsewhere = faults[0].traceback and faults[0].cause is None and self.directory is not None
            raise faults[0].error(f"\n  traceback: in {self.directory}/{FAULTS_FILE}" if elsewhere else "")
        rewards = {name: [self._reward(outcome) for outcome in column] for name, column in components.items()}
        if isinstance(self.function, WeightedRewards):
            return Scores(self.function.combined(list(rewards.values())), rewards, len(faults))
        return Scores(next(iter(rewards.values())), {}, len(faults))

    def close(self) -> None:
        """End the workers, busy ones too. They are started again when they are needed."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _cut(self, function: Callable[..., Any], count: int) -> list[range]:
        """Split the rows of a batch over the calls of a function."""
        size = max(count, 1) if self.options.sample_time_limit is None else getattr(function, "group_size", 1)
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _send(self, batch: Submitted) -> None:
        """Send the calls to the workers: each is a job, but all async ones are a single job, to be awaited together."""
        functions = list(self.parts.values())
        if self._pool is None:
            log = None if self.directory is None else self.directory / OUTPUT_FILE
            self._pool = Pool(functions, self.options, batch.tokenizer, log)
        alone = [[place] for place, call in enumerate(batch.calls) if not _is_async(call.function)]
        together = [place for place, call in enumerate(batch.calls) if _is_async(call.function)]
        names = list(self.parts)
        for places in [*alone, together] if together else alone:
            job = [(names.index(batch.places[place][0]), batch.calls[place]) for place in places]
            batch.answers.append((self._pool.submit(job), places))

    def _reward(self, outcome: Outcome) -> Reward:
        """Return the reward, or for a fault the replacement that `reward.on_error` asks for."""
        if not isinstance(outcome, Fault):
            return outcome
        return None if self.options.on_error == "abstain" else self.options.error_value

    def _record(self, batch: Submitted, outcomes: Sequence[Sequence[Outcome]]) -> list[Fault]:
        """Write the faults of a batch to the record, and return them."""
        found: dict[Fault, tuple[Call, list[int]]] = {}
        for call, of_call in zip(batch.calls, outcomes, strict=True):
            for row, outcome in enumerate(of_call):
                if isinstance(outcome, Fault):
                    found.setdefault(outcome, (call, []))[1].append(row)
        if found and self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            lines = [self._line(fault, call, rows, batch.step) for fault, (call, rows) in found.items()]
            path = self.directory / FAULTS_FILE
            with writing(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(lines))
        if found and self.options.on_error != "raise":
            first = next(iter(found))
            more = f" and {len(found) - 1} more faults" if len(found) > 1 else ""
            logger.warning("%s%s: see %s.", first.message[:300], more, FAULTS_FILE)
        return list(found)

    def _line(self, fault: Fault, call: Call, rows: Sequence[int], step: int) -> str:
        columns = {name: [values[row] for row in rows] for name, values in call.columns.items() if name != "samples"}
        record = {
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
        return json.dumps({name: _plain(value) for name, value in record.items()}, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """Convert a value to one that JSON can hold, with a description in the place of anything else."""
    try:
        return json.loads(json.dumps(value, default=_described, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)


def _described(value: Any) -> str:
    """Describe an image or a tensor by its size; any other value is given as Python writes it."""
    if is_picture(value):
        return f"an image of {value.width} x {value.height} pixels, {value.mode}"
    if type(value).__module__ == "torch" and hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def _is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a function, partial or callable object is async."""
    inner = getattr(function, "func", function)
    return iscoroutinefunction(inner) or iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
