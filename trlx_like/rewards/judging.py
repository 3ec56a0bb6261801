"""Asking a judge about groups of completions, and turning its answers into scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, SupportsIndex

from trlx_like.errors import RewardError, raised_as
from trlx_like.rewards.arguments import accepted, metadata_columns, name_of

KINDS = ("rank", "compare", "check")
"""The methods of judges. A judge that has several of them is asked by the first of these."""


def kind_of(judge: Any) -> str | None:
    """Return the name of the method by which an object judges, or None if it is no judge."""
    if isinstance(judge, type):
        return None
    return next((kind for kind in KINDS if callable(getattr(judge, kind, None))), None)


def judged(
    judge: Any,
    prompts: Sequence[str],
    groups: Sequence[Sequence[str]],
    metadata: Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
) -> list[list[float | None]]:
    """Ask a judge about groups of completions, and turn its answers into a score per completion.

    Args:
        judge: A judge of any kind.
        prompts: One prompt per group.
        groups: Completions of each prompt.
        metadata: The further keys of each prompt.
        tokenizer: Passed to the judge if it accepts it.

    Returns:
        For each group one score per completion; larger is better, None is an abstention. A judge that ranks or compares
        gives the fraction of the other completions of the group that a completion beats, where a tie or an abstention
        counts half. A judge that checks gives 1 or 0.

    Raises:
        RewardError: The judge failed, or answered in another form.
    """
    metadata = [{} for _ in prompts] if metadata is None else list(metadata)
    kind = kind_of(judge)
    if kind == "rank":
        ranks = _ask(judge, kind, prompts, {"completions": [list(group) for group in groups]}, metadata, tokenizer)
        return [
            _shares([None if place is None else -place for place in _ranks(judge, row, len(group))])
            for row, group in zip(ranks, groups, strict=True)
        ]
    rows = [place for place, group in enumerate(groups) for _ in group]
    if kind == "check":
        flat = {"completions": [text for group in groups for text in group]}
        checks = iter(_ask(judge, kind, [prompts[r] for r in rows], flat, [metadata[r] for r in rows], tokenizer))
        return [[_checked(judge, next(checks)) for _ in group] for group in groups]
    return _compared(judge, prompts, groups, metadata, tokenizer)


def _compared(
    judge: Any, prompts: Sequence[str], groups: Sequence[Sequence[str]], metadata: list[Any], tokenizer: Any
) -> list[list[float | None]]:
    """Compare each completion with each other of its group, once."""
    matches = [(row, a, b) for row, group in enumerate(groups) for a, b in combinations(range(len(group)), 2)]
    pairs = [(groups[row][a], groups[row][b]) for row, a, b in matches]
    asked = [prompts[row] for row, _, _ in matches]
    answers = _ask(judge, "compare", asked, {"pairs": pairs}, [metadata[row] for row, _, _ in matches], tokenizer)
    points = [[0.0] * len(group) for group in groups]
    for (row, a, b), answer in zip(matches, answers, strict=True):
        if answer is not None and (not isinstance(answer, SupportsIndex) or int(answer) not in (0, 1)):
            raise RewardError(f"{name_of(judge)}.compare returned {answer!r} for a pair; it must be 0, 1 or None.")
        share = 0.5 if answer is None else 1.0 - int(answer)
        points[row][a] += share
        points[row][b] += 1 - share
    return [[own / max(len(group) - 1, 1) for own in group] for group in points]


def _shares(values: list[float | None]) -> list[float | None]:
    """Return the fraction of the others that each value beats, where a tie counts half; None is left out."""
    known = [value for value in values if value is not None]

    def share(own: float) -> float:
        beaten = sum((own > other) + 0.5 * (own == other) for other in known) - 0.5  # it ties with itself
        return beaten / max(len(known) - 1, 1)

    return [None if value is None else share(value) for value in values]


def _ask(
    judge: Any, kind: str, prompts: Sequence[str], what: dict[str, Any], metadata: Sequence[Any], tokenizer: Any
) -> list[Any]:
    """Call a judge's method with the keywords that it accepts, and check that there is one answer per prompt."""
    if not prompts:
        return []
    method, name = getattr(judge, kind), f"{name_of(judge)}.{kind}"
    own = {"prompts": list(prompts), **what, "tokenizer": tokenizer}
    arguments = accepted(method, {**own, **metadata_columns(metadata)}, tuple(own))
    try:
        answers = list(method(**arguments))
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"{name} raised {type(error).__name__}: {error}\n  first prompt: {prompts[0]!r}") from error
    if len(answers) != len(prompts):
        raise RewardError(f"{name} returned {len(answers)} answers for {len(prompts)} questions.")
    return answers


def _ranks(judge: Any, row: Any, count: int) -> list[float | None]:
    """Check the ranks of one group."""
    what = f"{name_of(judge)}.rank returned {row!r}, which is no list of places"
    with raised_as(RewardError, (TypeError, ValueError), what):
        places = [None if place is None else float(place) for place in row]
    if len(places) != count or any(place is not None and math.isnan(place) for place in places):
        raise RewardError(f"{name_of(judge)}.rank returned {row!r} for {count} completions; give each a place or None.")
    return places


def _checked(judge: Any, answer: Any) -> float | None:
    """Check the answer on one completion."""
    if answer is None:
        return None
    if answer not in (True, False):
        raise RewardError(f"{name_of(judge)}.check returned {answer!r}; it must be True, False or None.")
    return float(answer)
