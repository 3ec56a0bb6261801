"""Calling the user's functions on what was sampled, such that a failure on one process is a failure on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trlx_like.distributed import Group
from trlx_like.errors import RewardError
from trlx_like.rewards import call_metric, call_reward
from trlx_like.rewards.call import Reward

T = TypeVar("T")
Row = dict[str, Any]
"""What a function may see of a sample, as `TextSamples.rows` makes it."""


def score(
    group: Group, function: Callable[..., Any], rows: Sequence[Row], tokenizer: Any, *, on_main: bool
) -> list[Reward]:
    """A reward for each row of this process. All processes have to call this equally often.

    on_main: the main process calls the function with the rows of all; otherwise each does with its own.
    """
    seen = group.gather(list(rows)) if on_main else list(rows)

    def call() -> list[Reward]:
        return call_reward(function, *_columns(seen), tokenizer, [row["length"] for row in seen])

    rewards = _called(group, call if seen and (group.main or not on_main) else list)
    if not on_main:
        return rewards
    before = sum(group.gather([len(rows)])[: group.rank])
    return group.broadcast(rewards)[before : before + len(rows)]


def measure(group: Group, function: Callable[..., Any], rows: Sequence[Row], tokenizer: Any) -> dict[str, list[float]]:
    """Metrics of the rows of this process by name, one number a row. To be called as `score` is."""

    def call() -> dict[str, list[float]]:
        metrics = call_metric(function, *_columns(rows), tokenizer)
        return {name: values * (len(rows) if len(values) == 1 else 1) for name, values in metrics.items()}

    return _called(group, call if rows else dict)


def _called(group: Group, call: Callable[[], T]) -> T:
    """What `call` returns. RewardError on every process if it raises that on one, so that none waits for another."""
    failure, result = None, None
    try:
        result = call()
    except RewardError as error:
        failure = error
    messages = group.gather([None if failure is None else str(failure)])
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RewardError(f"On process {rank}: {message}")
    assert result is not None
    return result


def _columns(rows: Sequence[Row]) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """Texts by name, and the metadata of each prompt."""
    texts = {name: [row[name] for row in rows] for name in ("samples", "prompts", "outputs")}
    return texts, [row["metadata"] for row in rows]
