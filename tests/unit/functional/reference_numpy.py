"""The formulas once more, in float64 and plain loops over single numbers, for the tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def elementwise(formula: Callable[..., float], *arrays: Array) -> Array:
    out = np.empty(arrays[0].shape)
    for place in np.ndindex(out.shape):
        out[place] = formula(*(float(a[place]) for a in arrays))
    return out


def real_values(x: Array, mask: Mask) -> list[float]:
    return [float(x[place]) for place in np.ndindex(x.shape) if mask[place]]


def stats(values: Sequence[float]) -> tuple[int, float, float]:
    if not values:
        return 0, 0.0, 0.0
    mean = math.fsum(values) / len(values)
    return len(values), mean, math.fsum((v - mean) ** 2 for v in values)


def whiten(x: Array, mask: Mask, center: bool) -> Array:
    n, mean, m2 = stats(real_values(x, mask))
    deviation = math.sqrt(m2 / (n - 1) + 1e-8) if n > 1 else 1e-4
    shift = 0.0 if center else mean
    return np.where(mask, (x - mean) / deviation + shift, 0.0)


def gae(rewards: Array, values: Array, mask: Mask, gamma: float, lam: float) -> tuple[Array, Array]:
    """A_t as the explicit sum of (gamma lam)^k delta_{t+k}, row by row over the real tokens."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for row in range(len(rewards)):
        places = [int(t) for t in np.flatnonzero(mask[row])]
        r = [float(rewards[row, t]) for t in places]
        v = [float(values[row, t]) for t in places] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(places))]
        for i, t in enumerate(places):
            advantages[row, t] = math.fsum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(places)))
            returns[row, t] = advantages[row, t] + v[i]
    return advantages, returns


def discounted_returns(rewards: Array, mask: Mask, gamma: float) -> Array:
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        places = [int(t) for t in np.flatnonzero(mask[row])]
        for i, t in enumerate(places):
            out[row, t] = math.fsum(gamma**k * float(rewards[row, u]) for k, u in enumerate(places[i:]))
    return out


def kl_token(logprob: float, ref_logprob: float, kind: str) -> float:
    d = logprob - ref_logprob
    if kind == "kl":
        return d
    if kind == "abs":
        return d if d > 0 else -d
    if kind == "mse":
        return d * d / 2
    return math.exp(ref_logprob) / math.exp(logprob) - 1 + d


def clipped_surrogate(logprob: float, old_logprob: float, advantage: float, cliprange: float) -> float:
    ratio = math.exp(logprob) / math.exp(old_logprob)
    # By cases: a positive advantage caps the ratio from above, a negative one bounds it from below.
    if advantage >= 0:
        return -advantage * min(ratio, 1 + cliprange)
    return -advantage * max(ratio, 1 - cliprange)


def clip_indicator(logprob: float, old_logprob: float, cliprange: float) -> float:
    ratio = math.exp(logprob) / math.exp(old_logprob)
    return float(ratio > 1 + cliprange or ratio < 1 - cliprange)


def clipped_value_loss(value: float, old_value: float, target: float, cliprange: float | None) -> float:
    losses = [(value - target) ** 2]
    if cliprange is not None:
        near = min(max(value, old_value - cliprange), old_value + cliprange)
        losses.append((near - target) ** 2)
    return max(losses) / 2


def explained_variance(values: Array, returns: Array, mask: Mask) -> float:
    _, _, total = stats(real_values(returns, mask))
    _, _, residual = stats(real_values(returns - values, mask))
    return 1 - residual / total if total > 0 else 0.0


def distribution(logits: Array, temperature: float, allowed: Mask | None) -> list[float]:
    """Probabilities of one row of logits [V]."""
    weights = []
    for v, logit in enumerate(logits):
        possible = allowed is None or bool(allowed[v])
        weights.append(math.exp(float(logit) / temperature) if possible else 0.0)
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy(probs: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probs if p > 0)


def kl(probs: Sequence[float], ref_probs: Sequence[float]) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(probs, ref_probs, strict=True) if p > 0)
