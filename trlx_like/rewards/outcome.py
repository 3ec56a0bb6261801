"""A call of a user's function, and its outcome for each sample: a reward, or a fault in its place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trlx_like.errors import RewardError
from trlx_like.rewards.arguments import Columns, name_of
from trlx_like.rewards.limits import Limit

Reward = float | list[float] | None
"""The reward of one sample: a number, a list with a number per response token, or None if the function abstains."""


@dataclass(eq=False)
class Fault:
    """Hold the reason why some samples have no reward: a call that failed, or a value that cannot be used."""

    kind: str  # raised, wrong length, wrong type, not finite, time limit, memory limit, died
    function: str
    message: str
    shown: str = ""  # the first of its samples, as the last lines of an error
    traceback: str = ""
    cause: BaseException | None = None  # only in the process in which it was raised

    def error(self, more: str = "") -> RewardError:
        """Make the error that ends a run for this fault."""
        error = RewardError(self.message + self.shown + more)
        error.__cause__ = self.cause
        return error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cause": None}


Outcome = Reward | Fault


@dataclass
class Call:
    """Hold one call of a function on some samples."""

    function: Callable[..., Any]
    columns: Columns
    metadata: Sequence[Mapping[str, Any]]
    lengths: Sequence[int] | None = None
    """Response tokens of each sample, the most rewards that it may have. 0: the reward must be a single number."""
    begin: Callable[[], Limit | None] = lambda: None
    """Called when the function call begins; returns its time limit."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def fault(self, kind: str, what: str, error: BaseException | None = None, row: int = 0, note: str = "") -> Fault:
        """Describe a failure of the call, or of its sample `row`. `what` continues a sentence after the name."""
        trace = "" if error is None else "".join(traceback.format_exception(error))
        name = name_of(self.function)
        columns = [column for column in ("prompts", "outputs") if row < len(self.columns.get(column, ()))]
        sample = "".join(f"\n  {column[:-1]}: {shortened(self.columns[column][row])}" for column in columns)
        return Fault(kind, name, f"{name} {what}", note + sample, trace, error)

    def late(self, limit: Limit, error: BaseException | None = None) -> Fault:
        """Describe that the call took longer than its limit."""
        return self.fault("time limit", f"took longer than {limit.option} ({limit.granted:g} s).", error)

    def raised(self, error: BaseException) -> Fault:
        """Describe an exception that ended the whole call."""
        note = f"\n  on {len(self)} samples, of which this is the first:"
        return self.fault("raised", f"raised {type(error).__name__}: {error}", error, note=note)


def whole(reward: Reward) -> float | None:
    """Return the reward of a whole response: the sum of its tokens' rewards; None if the function abstained."""
    return sum(reward) if isinstance(reward, list) else reward


def shortened(value: Any) -> str:
    """Return the representation of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
