"""Calling the user's reward and metric functions, and checking every value before anything is trained on it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsFloat

from trlx_like.errors import RewardError

Reward = float | list[float] | None
"""Of one sample: a score for the whole, one a response token, or None for "I abstain"."""

GIVEN = ("samples", "prompts", "outputs", "tokenizer")
"""What a reward function may ask for whatever the prompts are."""


class RewardFn(Protocol):
    """Called with keywords, those that it accepts: samples, prompts, outputs, tokenizer and the prompts' metadata."""

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], **metadata: Any
    ) -> Sequence[float] | Sequence[Sequence[float]]: ...


def call_reward(
    function: Callable[..., Any],
    texts: Mapping[str, list[str]],
    metadata: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
    lengths: Sequence[int] | None = None,
) -> list[Reward]:
    """One reward a sample.

    texts: "samples", "prompts", "outputs". metadata: of each prompt. lengths: response tokens of each sample, the
    most that a per-token reward may have. Raises RewardError that names the function and shows the sample.
    """
    count = len(texts["samples"])
    returned = _call(function, {**texts, "tokenizer": tokenizer, **columns(metadata)}, texts)
    values = _as_list(returned, function)
    if len(values) != count:
        raise RewardError(
            f"{name_of(function)} returned {len(values)} rewards for {count} samples, {_short(values)}; it must return "
            f"one a sample.{_shown(texts, 0)}"
        )
    rewards = []
    for row, value in enumerate(values):
        try:
            rewards.append(_read(value, None if lengths is None else lengths[row]))
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(
                f"{name_of(function)} returned {_short(value)} for sample {row}: {error}{_shown(texts, row)}"
            ) from error
    return rewards


def call_metric(
    function: Callable[..., Any],
    texts: Mapping[str, list[str]],
    metadata: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
) -> dict[str, list[float]]:
    """The metrics of a `metric_fn`: a name to one number a sample, or to a single number (a list of one here)."""
    returned = _call(function, {**texts, "tokenizer": tokenizer, **columns(metadata)}, texts)
    if not isinstance(returned, Mapping):
        raise RewardError(
            f"{name_of(function)} returned a {type(returned).__name__}; a metric_fn returns a dict from a name to "
            "numbers."
        )
    count = len(texts["samples"])
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


def _call(function: Callable[..., Any], keywords: Mapping[str, Any], texts: Mapping[str, list[str]]) -> Any:
    given = dict(accepted(function, keywords))
    # Copies: a function that sorts or pops its arguments must not change what is trained on.
    given = {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        returned = function(**given)
        return list(returned) if isinstance(returned, Iterator) else returned  # a generator has not run yet
    except Exception as error:
        raise RewardError(
            f"{name_of(function)} raised {type(error).__name__}: {error}\n"
            f"  on {len(texts['samples'])} samples, of which this is the first:{_shown(texts, 0)}"
        ) from error


def accepted(
    function: Callable[..., Any], keywords: Mapping[str, Any], own: Sequence[str] = GIVEN
) -> Mapping[str, Any]:
    """The keywords that the function takes: all of them when it has **kwargs.

    own: those that it is given with any prompts; the others are keys of the prompts. RewardError for one that it wants
    and nobody has.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return keywords
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return keywords
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.name in names}
    missing = required - set(keywords)
    if missing:
        raise RewardError(
            f"{name_of(function)} wants {', '.join(sorted(missing))}, which is neither {', '.join(own[:-1])} or "
            f"{own[-1]} nor a key of the prompts ({', '.join(sorted(set(keywords) - set(own))) or 'they have none'})."
        )
    return {name: value for name, value in keywords.items() if name in names}


def columns(metadata: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of metadata as one list a key; None where a prompt does not have it."""
    names = {name: None for row in metadata for name in row}
    return {name: [row.get(name) for row in metadata] for name in names}


def _as_list(returned: Any, function: Callable[..., Any]) -> list[Any]:
    if not _is_list(returned):
        raise RewardError(
            f"{name_of(function)} returned a {type(returned).__name__}, {_short(returned)}; it must return a list with "
            "one entry a sample."
        )
    return list(_plain(returned))


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
    dense = [_finite(entry) for entry in _plain(value)]
    if not dense:
        raise ValueError("a per-token reward needs at least one entry.")
    if length is not None and len(dense) > length:
        raise ValueError(f"{len(dense)} per-token rewards for a response of {length} tokens.")
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


def _shown(texts: Mapping[str, list[str]], row: int) -> str:
    """A sample, as the last lines of a message."""
    if not texts["samples"]:
        return ""
    return f"\n  prompt: {_short(texts['prompts'][row])}\n  output: {_short(texts['outputs'][row])}"
