"""Calling the user's reward and metric functions, and checking every value before anything is trained on it.

What goes wrong with a reward is a `Fault`; `rewards/runner.py` decides what becomes of its samples.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

from trlx_like.errors import RewardError
from trlx_like.rewards.limits import Limit, TimeUp, alarm

Reward = float | list[float] | None
"""Of one sample: a score for the whole, one a response token, or None for "I abstain"."""

Given = Mapping[str, Sequence[Any]]
"""What a function sees of a batch, a list with one entry a sample each: "samples", "prompts", "outputs" of text."""


class RewardFn(Protocol):
    """Called with keywords, those that it accepts: samples, prompts, outputs, tokenizer and the prompts' metadata."""

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], **metadata: Any
    ) -> Sequence[float] | Sequence[Sequence[float]]: ...


@dataclass(eq=False)
class Fault:
    """Why some samples have no reward: a call that failed, or a value that cannot be used."""

    kind: str  # raised, wrong length, wrong type, not finite, time limit, memory limit, died
    function: str
    message: str
    shown: str = ""  # the first of its samples, as the last lines of an error
    traceback: str = ""
    cause: BaseException | None = None  # in the process that it happened in

    def error(self, more: str = "") -> RewardError:
        error = RewardError(self.message + self.shown + more)
        error.__cause__ = self.cause
        return error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cause": None}


Outcome = Reward | Fault


def _unlimited() -> Limit | None:
    return None


@dataclass
class Call:
    """A call of a function on some samples.

    lengths: response tokens of each, the most that a per-token reward may have; of 0 it has to be one number.
    """

    function: Callable[..., Any]
    given: Given
    metadata: Sequence[Mapping[str, Any]]
    lengths: Sequence[int] | None = None
    allowed: Callable[[], Limit | None] = field(default=_unlimited)
    """Asked when the call begins: how long it may take."""

    def __len__(self) -> int:
        return len(next(iter(self.given.values())))

    def fault(self, kind: str, what: str, error: BaseException | None = None, row: int = 0, note: str = "") -> Fault:
        """Of the whole call, or of one row. what: how the sentence goes on after the function's name."""
        trace = "" if error is None else "".join(traceback.format_exception(error))
        name = name_of(self.function)
        return Fault(kind, name, f"{name} {what}", note + _shown(self.given, row), trace, error)

    def late(self, limit: Limit, error: BaseException | None = None) -> Fault:
        return self.fault("time limit", f"took longer than {limit.option} ({limit.granted:g} s).", error)


def call_reward(
    function: Callable[..., Any],
    given: Given,
    metadata: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
) -> list[Reward]:
    """One reward a sample; RewardError that names the function and shows the sample for the first fault."""
    (outcomes,) = run([Call(function, given, metadata, lengths)], tokenizer)
    rewards: list[Reward] = []
    for outcome in outcomes:
        if isinstance(outcome, Fault):
            raise outcome.error()
        rewards.append(outcome)
    return rewards


def run(calls: Sequence[Call], tokenizer: Any = None, *, killable: bool = False) -> list[list[Outcome]]:
    """What comes of calls, an outcome a sample each. What they return to be awaited is awaited together at the end.

    killable: somebody outside ends this process when a call cannot be interrupted. RewardError for an argument that a
    function wants and nobody gives.
    """
    outcomes: list[list[Outcome]] = []
    waiting: dict[int, Any] = {}
    for place, call in enumerate(calls):
        returned = _returned(call, tokenizer, killable)
        if not isinstance(returned, Fault) and _to_be_awaited(returned):
            waiting[place] = returned
        outcomes.append([] if place in waiting else _checked(call, returned))
    if waiting:
        for place, returned in _awaited({place: (calls[place], raw) for place, raw in waiting.items()}).items():
            outcomes[place] = _checked(calls[place], returned)
    return outcomes


def _returned(call: Call, tokenizer: Any, killable: bool) -> Any:
    """What the function returns, or the fault. Interrupts pass through."""
    keywords = {
        **{name: _stacked(values) for name, values in call.given.items()},
        "tokenizer": tokenizer,
        **columns(call.metadata),
    }
    # Copies: a function that sorts or pops its arguments must not change what is trained on.
    given = {
        name: _copied(value) for name, value in accepted(call.function, keywords, [*call.given, "tokenizer"]).items()
    }
    limit = call.allowed()
    try:
        with alarm(limit, None if killable else name_of(call.function)):
            returned = call.function(**given)
            return list(returned) if isinstance(returned, Iterator) else returned  # a generator has not run yet
    except TimeUp as error:
        assert limit is not None
        return call.late(limit, error)
    except (Exception, SystemExit) as error:
        return _raised(call, error)


def _raised(call: Call, error: BaseException) -> Fault:
    note = f"\n  on {len(call)} samples, of which this is the first:"
    return call.fault("raised", f"raised {type(error).__name__}: {error}", error, note=note)


# What is awaited.


def _to_be_awaited(returned: Any) -> bool:
    return inspect.isawaitable(returned) or (
        isinstance(returned, (list, tuple)) and any(inspect.isawaitable(entry) for entry in returned)
    )


def _awaited(waiting: Mapping[int, tuple[Call, Any]]) -> dict[int, Any]:
    """What comes of what functions returned to be awaited, each within its time; all are under way at once."""
    done: dict[int, Any] = {}
    limits = {place: call.allowed() for place, (call, _) in waiting.items()}

    async def one(place: int, call: Call, returned: Any) -> None:
        limit = limits[place]
        try:
            async with asyncio.timeout(None if limit is None else max(limit.seconds, 0)) as timer:
                done[place] = await _settled(returned)
        except (Exception, SystemExit) as error:
            late = limit is not None and timer.expired() and isinstance(error, TimeoutError)
            done[place] = call.late(limit, error) if late and limit is not None else _raised(call, error)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(place, *pair) for place, pair in waiting.items()))

    known = [limit for limit in limits.values() if limit is not None]
    longest = max(known, key=lambda limit: limit.seconds) if len(known) == len(limits) else None
    try:
        _run_loop(all_of_them, longest)
    except (TimeUp, SystemExit) as error:  # of one that blocks or ends the loop in which the others wait
        for place in set(waiting) - set(done):
            call, limit = waiting[place][0], limits[place]
            late = isinstance(error, TimeUp) and limit is not None
            done[place] = call.late(limit, error) if late and limit is not None else _raised(call, error)
    return done


async def _settled(returned: Any) -> Any:
    values = await returned if inspect.isawaitable(returned) else returned
    if not (isinstance(values, (list, tuple)) and any(map(inspect.isawaitable, values))):
        return values
    pending = iter(await asyncio.gather(*filter(inspect.isawaitable, values), return_exceptions=True))
    return [next(pending) if inspect.isawaitable(value) else value for value in values]


def _run_loop(work: Callable[[], Any], limit: Limit | None) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # With a second more than the loop's own timers have, which can say whose time it is.
        with alarm(None if limit is None else limit.later(1.0), None):
            asyncio.run(work())
        return
    thread = threading.Thread(target=lambda: asyncio.run(work()))  # a notebook's loop is running in this one
    thread.start()
    thread.join()


# Checks.


def _checked(call: Call, returned: Any) -> list[Outcome]:
    """An outcome a sample."""
    count = len(call)
    if isinstance(returned, Fault):
        return [returned] * count
    if not _is_list(returned):
        what = (
            f"returned a {type(returned).__name__}, {_short(returned)}; it must return a list with one entry a sample."
        )
        fault = call.fault("wrong type", what)
        fault.shown = ""
        return [fault] * count if count else _raise(fault)
    values = list(_plain(returned))
    if len(values) != count:
        what = f"returned {len(values)} rewards for {count} samples, {_short(values)}; it must return one a sample."
        fault = call.fault("wrong length", what)
        return [fault] * count if count else _raise(fault)
    outcomes: list[Outcome] = []
    for row, value in enumerate(values):
        if isinstance(value, Exception):  # of what was awaited for this sample
            outcomes.append(call.fault("raised", f"raised {type(value).__name__}: {value}", value, row))
            continue
        try:
            outcomes.append(_read(value, None if call.lengths is None else call.lengths[row]))
        except (TypeError, ValueError, OverflowError) as error:
            what = f"returned {_short(value)} for sample {row}: {error}"
            outcomes.append(call.fault(_kind(error), what, error, row))
    return outcomes


def _raise(fault: Fault) -> list[Outcome]:
    """There is no sample to hang the fault on."""
    raise fault.error()


def _kind(error: Exception) -> str:
    if isinstance(error, TypeError):
        return "wrong type"
    return "wrong length" if isinstance(error, _Length) else "not finite"


class _Length(ValueError):
    """Of a reward for each token."""


def call_metric(
    function: Callable[..., Any], given: Given, metadata: Sequence[Mapping[str, Any]], tokenizer: Any = None
) -> dict[str, list[float]]:
    """The metrics of a `metric_fn`: a name to one number a sample, or to a single number (a list of one here)."""
    call = Call(function, given, metadata)
    returned = _returned(call, tokenizer, killable=False)
    if isinstance(returned, Fault):
        raise returned.error()
    if not isinstance(returned, Mapping):
        raise RewardError(
            f"{name_of(function)} returned a {type(returned).__name__}; a metric_fn returns a dict from a name to "
            "numbers."
        )
    count = len(call)
    metrics = {}
    for name, value in returned.items():
        values = list(_plain(value)) if _is_list(value) else [value]
        if len(values) not in (1, count):
            raise RewardError(
                f"{name_of(function)}: metric {name!r} has {len(values)} values for {count} samples; give one a "
                "sample or a single number."
            )
        try:
            metrics[str(name)] = [_number(v) for v in values]
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"{name_of(function)}: metric {name!r} is not made of numbers: {error}") from error
    return metrics


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any], own: Sequence[str]) -> Mapping[str, Any]:
    """The keywords that the function takes: all of them when it has **kwargs.

    own: those that it is given with any prompts; the others are keys of the prompts. RewardError for one that it wants
    and nobody has.
    """
    names, required, everything = parameters(function)
    if everything:
        return keywords
    missing = required - set(keywords)
    if missing:
        raise RewardError(
            f"{name_of(function)} wants {', '.join(sorted(missing))}, which is neither {', '.join(own[:-1])} or "
            f"{own[-1]} nor a key of the prompts ({', '.join(sorted(set(keywords) - set(own))) or 'they have none'})."
        )
    return {name: value for name, value in keywords.items() if name in names}


def parameters(function: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """The keywords that a function takes, those that it must have, and whether it takes any."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return set(), set(), True
    names = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in found if p.default is p.empty and p.name in names}
    return names, required, any(p.kind is p.VAR_KEYWORD for p in found)


def columns(metadata: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of metadata as one list a key; None where a prompt does not have it."""
    names = {name: None for row in metadata for name in row}
    return {name: [row.get(name) for row in metadata] for name in names}


def _stacked(values: Sequence[Any]) -> Any:
    """Images that come as tensors of one shape as one tensor; all else as it is."""
    if not all(type(value).__module__ == "torch" for value in values) or len({value.shape for value in values}) != 1:
        return values
    import torch  # late: a worker of `reward.workers` does without it where it can

    return torch.stack(list(values))


def _copied(value: Any) -> Any:
    """A copy of lists, dicts and PIL images, also of those within; texts and all else are the same ones."""
    if type(value) is list:
        return [_copied(entry) for entry in value]
    if is_picture(value):
        return value.copy()
    return {key: _copied(entry) for key, entry in value.items()} if type(value) is dict else value


def is_picture(value: Any) -> bool:
    """Whether it is an image of PIL, which is not imported for that."""
    return any((kind.__module__, kind.__name__) == ("PIL.Image", "Image") for kind in type(value).__mro__)


def _plain(value: Any) -> Any:
    """Tensors, arrays, their scalars and columns of tables as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: Any) -> bool:
    return hasattr(_plain(value), "__iter__") and not isinstance(value, (str, bytes, Mapping))


def _read(value: Any, length: int | None) -> Reward:
    """A checked reward. ValueError or TypeError says what is wrong with it."""
    if value is None:
        return None
    if not _is_list(value):
        return _finite(value)
    if length == 0:
        raise _Length("it must be one number.")
    dense = [_finite(entry) for entry in _plain(value)]
    if not dense:
        raise _Length("a per-token reward needs at least one entry.")
    if length is not None and len(dense) > length:
        raise _Length(f"{len(dense)} per-token rewards for a response of {length} tokens.")
    return dense


def _finite(value: Any) -> float:
    number = _number(value)
    if not math.isfinite(number):
        raise ValueError("a reward must be finite.")
    return number


def _number(value: Any) -> float:
    """Of text there is none, although `float` reads some."""
    value = _plain(value)
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {type(value).__name__} is not a number.")
    return float(value)


def name_of(function: Callable[..., Any]) -> str:
    """How an error calls it."""
    return getattr(function, "__qualname__", type(function).__name__)


def _short(value: Any, longest: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _shown(given: Given, row: int) -> str:
    """A sample, as the last lines of a message."""
    names = [name for name in ("prompts", "outputs") if row < len(given.get(name, ()))]
    return "".join(f"\n  {name[:-1]}: {_short(given[name][row])}" for name in names)
