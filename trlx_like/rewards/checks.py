"""Checks of the values that a reward function returned, before anything is trained on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from trlx_like.functional.reward_range import LARGEST_REWARD
from trlx_like.rewards.alignment import align
from trlx_like.rewards.arguments import parameters
from trlx_like.rewards.outcome import Call, Fault, Outcome, Reward, shortened


class _WrongLength(ValueError):
    """Report a list of per-token rewards that does not fit its sample."""


def outcomes_of(call: Call, returned: Any) -> list[Outcome]:
    """Convert the value that a call returned to one outcome per sample.

    Raises:
        RewardError: The call had no samples, but returned anything other than an empty list.
    """
    count = len(call)
    if isinstance(returned, Fault):
        return [returned] * count
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        what = f"returned rewards and a {type(returned[1]).__name__}, as for TRL's DDPO; return the rewards alone."
        fault = call.fault("wrong type", what, row=count)
    elif is_list(returned):
        values = list(plain(returned))
        # A column, as models with one output return it.
        if hasattr(returned, "tolist") and tuple(returned.shape[1:]) == (1,):
            values = [value for (value,) in values]
        if len(values) == count:
            return [_outcome(call, row, value) for row, value in enumerate(values)]
        what = f"returned {len(values)} rewards for {count} samples, {shortened(values)}"
        fault = call.fault("wrong length", f"{what}; it must return one per sample.")
    else:
        what = f"returned a {type(returned).__name__}, {shortened(returned)}"
        fault = call.fault("wrong type", f"{what}; it must return a list with one entry a sample.", row=count)
    if not count:  # no sample can carry the fault
        raise fault.error()
    return [fault] * count


def _outcome(call: Call, row: int, value: Any) -> Outcome:
    """Check the value for one sample."""
    if isinstance(value, Exception):  # raised while this sample's value was awaited
        return call.fault("raised", f"raised {type(value).__name__}: {value}", value, row)
    try:
        return _reward(value, None if call.lengths is None else call.lengths[row])
    except (TypeError, ValueError, OverflowError) as error:
        kind = "wrong length" if isinstance(error, _WrongLength) else "not finite"
        kind = "wrong type" if isinstance(error, TypeError) else kind
        return call.fault(kind, f"returned {shortened(value)} for sample {row}: {error}", error, row)


def _reward(value: Any, length: int | None) -> Reward:
    """Convert a value to a reward, or raise an exception that says why it is not one."""
    if value is None:
        return None
    if not is_list(value):
        return _finite(value)
    if length == 0:
        raise _WrongLength("it must be one number.")
    entries = list(plain(value))
    if not entries and length is not None:
        raise _WrongLength("a per-token reward needs at least one entry.")
    if length is None and all(isinstance(entry, list | tuple) and len(entry) == 3 for entry in entries):
        return [_span(*entry) for entry in entries]
    dense = [_finite(entry) for entry in entries]
    if length is not None and len(dense) > length:
        raise _WrongLength(f"{len(dense)} per-token rewards for a response of {length} tokens.")
    return dense


def _span(begin: Any, end: Any, value: Any) -> Any:
    begin, end = plain(begin), plain(end)
    if not (isinstance(begin, int) and isinstance(end, int)):
        raise TypeError(f"a span is (begin, end, reward) with whole numbers of characters, not {(begin, end, value)}.")
    return begin, end, _finite(value)


def aligned(call: Call, outcomes: list[Outcome], ids: Sequence[Sequence[int]], tokenizer: Any) -> list[Outcome]:
    """Return the outcomes of a call with one reward per sampled token in place of other lists of rewards.

    Args:
        call: The call, with its outputs as text.
        outcomes: The outcome of each sample.
        ids: The sampled tokens of each response.
        tokenizer: The tokenizer of the policy.
    """
    sees_ids = bool({"output_ids", "output_offsets"} & parameters(call.function)[0])
    found: list[Outcome] = []
    for row, (outcome, text) in enumerate(zip(outcomes, call.columns["outputs"], strict=True)):
        if isinstance(outcome, list):
            try:
                outcome = align(outcome, ids[row], text, tokenizer, sees_ids=sees_ids)
            except ValueError as error:
                what = f"returned {shortened(outcome)} for sample {row}: {error}"
                outcome = call.fault("wrong length", what, error, row)
        found.append(outcome)
    return found


def _finite(value: Any) -> float:
    number = number_of(value)
    if not math.isfinite(number):
        raise ValueError("a reward must be finite.")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"the absolute value of a reward must not be above {LARGEST_REWARD:g}; scale the rewards.")
    return number


def number_of(value: Any) -> float:
    """Convert a value to a float. Text is refused, although `float` reads some."""
    value = plain(value)
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {type(value).__name__} is not a number.")
    return float(value)


def plain(value: Any) -> Any:
    """Convert tensors, arrays, their scalars and columns of tables to lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: Any) -> bool:
    """Tell whether a value has entries and is neither text nor a mapping."""
    return hasattr(plain(value), "__iter__") and not isinstance(value, (str, bytes, Mapping))
