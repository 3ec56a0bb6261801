"""The losses on pairs once more, one pair at a time in float64 and in probabilities, for the tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def score(d: float, kind: str, coef: float) -> float:
    """f'(u) at the ratio u = pi / pi_ref."""
    u = math.exp(d)
    if kind == "reverse_kl":
        return math.log(u)
    if kind == "forward_kl":
        return 1 - 1 / u
    if kind == "js_divergence":
        return math.log(2 * u / (1 + u))
    return (u ** (coef - 1) - 1) / (coef - 1)


def robust(m: float, e: float) -> float:
    """The estimate whose mean over flipped labels is the loss without noise."""
    right, wrong = -math.log(sigmoid(m)), -math.log(sigmoid(-m))
    return ((1 - e) * right - e * wrong) / (1 - 2 * e)


def exo_pair(m: float, e: float) -> float:
    """The divergence of two distributions over the two completions."""
    policy, labels = (sigmoid(m), 1 - sigmoid(m)), (1 - e, e)
    return math.fsum(p * math.log(p / q) for p, q in zip(policy, labels, strict=True))


def smoothed(m: float, e: float) -> float:
    """The cross-entropy of noisy labels."""
    return -math.fsum([(1 - e) * math.log(sigmoid(m)), e * math.log(1 - sigmoid(m))])


def nca_pair(c: float, r: float) -> float:
    return -math.log(sigmoid(c) * math.sqrt(sigmoid(-c) * sigmoid(-r)))


def bco_pair(c: float, r: float) -> float:
    return -math.log(sigmoid(c) * sigmoid(-r))


def discopop(m: float, tau: float) -> float:
    weight = sigmoid(m / tau)
    return (1 - weight) * math.log(1 + math.exp(-m)) + weight / math.exp(m)


LOSSES: dict[str, tuple[Callable[..., float], int]] = {
    "sigmoid": (lambda m: math.log(1 + math.exp(-m)), 1),
    "smoothed": (lambda m: smoothed(m, 0.2), 1),
    "robust": (lambda m: robust(m, 0.2), 1),
    "hinge": (lambda m: 1 - m if m < 1 else 0.0, 1),
    "ipo": (lambda m: m * m - m / 0.3 + 1 / (4 * 0.3**2), 1),
    "exo_pair": (lambda m: exo_pair(m, 0.2), 1),
    "discopop": (lambda m: discopop(m, 0.5), 1),
    "nca_pair": (nca_pair, 2),
    "bco_pair": (bco_pair, 2),
    "sppo_hard": (lambda c, r: c * c + r * r - (c - r) / 0.3 + 1 / (2 * 0.3**2), 2),
    "apo_zero": (lambda c, r: sigmoid(-c) + sigmoid(r), 2),
    "apo_down": (lambda c, r: sigmoid(c) + sigmoid(r - c), 2),
}
