"""Calling the user's reward and metric functions, and checking every value before anything is trained on it.

A failure is a `Fault`; `rewards/runner.py` decides what happens to its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from trlx_like.errors import RewardError, raised_as
from trlx_like.rewards.arguments import Columns, accepted, copied, keywords_of, name_of
from trlx_like.rewards.awaiting import awaited, needs_await
from trlx_like.rewards.checks import is_list, number_of, outcomes_of, plain
from trlx_like.rewards.limits import TimeUp, alarm
from trlx_like.rewards.outcome import Call, Fault, Outcome, Reward

__all__ = ["Reward", "RewardFn", "call_metric", "call_reward", "run_calls"]


class RewardFn(Protocol):
    """Score a batch of samples. The function gets only the keywords that it accepts."""

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], **metadata: Any
    ) -> Sequence[float] | Sequence[Sequence[float]]:
        """Return one reward per sample.

        Args:
            samples: Prompt and output of each sample.
            prompts: The prompts as text.
            outputs: The outputs as text.
            **metadata: `tokenizer`, and a list for each further key of the prompts.
        """


def call_reward(
    function: Callable[..., Any],
    columns: Columns,
    metadata: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
) -> list[Reward]:
    """Call a reward function on a batch and check its rewards.

    Args:
        function: The reward function; it may be async.
        columns: "samples", "prompts" and "outputs" of text, each a list with one entry per sample.
        metadata: The further keys of each prompt.
        tokenizer: Passed to the function if it accepts it.
        lengths: Response tokens of each sample, the most per-token rewards that it may have.

    Returns:
        One reward per sample.

    Raises:
        RewardError: The call failed, or a value cannot be used. It names the function and shows the sample.
    """
    (outcomes,) = run_calls([Call(function, columns, metadata, lengths)], tokenizer)
    if faults := [outcome for outcome in outcomes if isinstance(outcome, Fault)]:
        raise faults[0].error()
    return [outcome for outcome in outcomes if not isinstance(outcome, Fault)]


def call_metric(
    function: Callable[..., Any], columns: Columns, metadata: Sequence[Mapping[str, Any]], tokenizer: Any = None
) -> dict[str, list[float]]:
    """Call a metric function on a batch and check its metrics. The arguments are those of `call_reward`.

    Returns:
        For each metric one number per sample, or a list with a single number.

    Raises:
        RewardError: The function raised, or returned anything but a dict from names to numbers.
    """
    call = Call(function, columns, metadata)
    returned = _returned(call, tokenizer, killable=False)
    if isinstance(returned, Fault):
        raise returned.error()
    if not isinstance(returned, Mapping):
        raise RewardError(
            f"{name_of(function)} returned a {type(returned).__name__}; a metric_fn returns a dict from a name to "
            "numbers."
        )
    metrics = {}
    for name, value in returned.items():
        values = list(plain(value)) if is_list(value) else [value]
        if len(values) not in (1, len(call)):
            raise RewardError(
                f"{name_of(function)}: metric {name!r} has {len(values)} values for {len(call)} samples; give one "
                "per sample or a single number."
            )
        what = f"{name_of(function)}: metric {name!r} is not made of numbers"
        with raised_as(RewardError, (TypeError, ValueError, OverflowError), what):
            metrics[str(name)] = [number_of(v) for v in values]
    return metrics


def run_calls(calls: Sequence[Call], tokenizer: Any = None, *, killable: bool = False) -> list[list[Outcome]]:
    """Make calls one after the other, and then await all async ones concurrently.

    Args:
        calls: Functions with their samples.
        tokenizer: Passed to the functions that accept it.
        killable: Another process ends this one if a call cannot be interrupted.

    Returns:
        For each call one outcome per sample.

    Raises:
        RewardError: A function requires an argument that is not provided.
    """
    returned = [_returned(call, tokenizer, killable) for call in calls]
    if waiting := [place for place, value in enumerate(returned) if needs_await(value)]:
        for place, value in zip(waiting, awaited([(calls[p], returned[p]) for p in waiting]), strict=True):
            returned[place] = value
    return [outcomes_of(call, value) for call, value in zip(calls, returned, strict=True)]


def _returned(call: Call, tokenizer: Any, killable: bool) -> Any:
    """Call the function and return its value, or the fault. Keyboard interrupts pass through."""
    keywords = keywords_of(call.columns, call.metadata, tokenizer)
    # Copies: a function that sorts or pops its arguments must not change what is trained on.
    arguments = {
        name: copied(value) for name, value in accepted(call.function, keywords, [*call.columns, "tokenizer"]).items()
    }
    limit = call.begin()
    try:
        with alarm(limit, None if killable else name_of(call.function)):
            returned = call.function(**arguments)
            return list(returned) if isinstance(returned, Iterator) else returned  # a generator has not run yet
    except TimeUp as error:
        assert limit is not None
        return call.late(limit, error)
    except (Exception, SystemExit) as error:
        return call.raised(error)
