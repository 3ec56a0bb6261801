"""Group advantages in plain Python and float64, one prompt and one response at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Group = Sequence[float]
EPS = 1e-4


def mean(values: Group) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Group) -> float:
    """Unbiased; 0 for one value."""
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / max(len(values) - 1, 1))


def grpo(groups: Sequence[Group], scale: str) -> list[float]:
    """Advantages of all responses, one group after the other."""
    everything = [score for group in groups for score in group]
    found = []
    for group in groups:
        by = {"group": deviation(group), "batch": deviation(everything), "none": 1 - EPS}[scale] + EPS
        found += [(score - mean(group)) / by for score in group]
    return found


def rloo(groups: Sequence[Group]) -> list[float]:
    """Each score less the mean of the others of its group."""
    found = []
    for group in groups:
        for row, score in enumerate(group):
            others = [*group[:row], *group[row + 1 :]]
            found.append(score - mean(others) if others else 0.0)
    return found


def best_of(groups: Sequence[Group], k: int) -> list[tuple[float, float]]:
    """Mean best of all sets of k responses with each one, and of all sets of k others."""
    found = []
    for group in groups:
        size = min(k, len(group) - 1)
        for row, score in enumerate(group):
            others = [*group[:row], *group[row + 1 :]]
            own = [max(score, *chosen) for chosen in combinations(others, size - 1)] if size > 1 else [score]
            found.append((mean(own), mean([max(chosen) for chosen in combinations(others, size)]) if others else score))
    return found


def loss(responses: Sequence[Sequence[float]], kind: str, longest: int) -> float:
    """The loss of a global batch from the losses of the tokens of its responses."""
    if kind == "dapo":
        return mean([token for response in responses for token in response])
    if kind == "grpo":
        return mean([mean(response) for response in responses])
    return mean([math.fsum(response) / longest for response in responses])


def punishment(length: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def prefix(
    scores: Sequence[float], advantages: Sequence[float], groups: Sequence[int], rows: Sequence[Sequence[int]]
) -> list[float]:
    """Advantages of all tokens, one row after the other: own score less the baseline of its prefix."""
    found = []
    for row, tokens in enumerate(rows):
        baseline = scores[row] - advantages[row]
        for t in range(len(tokens)):
            if t > 0:
                sharing = [
                    other
                    for other, group in enumerate(groups)
                    if group == groups[row] and len(rows[other]) >= t and list(rows[other][:t]) == list(tokens[:t])
                ]
                baseline = mean([baseline if other == row else scores[other] for other in sharing])
            found.append(scores[row] - baseline)
    return found
