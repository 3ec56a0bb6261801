"""One denoising step in numpy and float64, from the definitions: posteriors by conditioning Gaussians.

A step is told by what the model believes (x0, e), or its velocity, at one point.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def believed(output: Array, x: Array, a: float, prediction: str) -> tuple[Array, Array]:
    """(x0, e) as the solution of the two linear equations x = sqrt(a) x0 + sqrt(1-a) e, output = <its definition>."""
    rows = {"epsilon": [0, 1], "sample": [1, 0], "v_prediction": [-math.sqrt(1 - a), math.sqrt(a)]}
    matrix = np.array([[math.sqrt(a), math.sqrt(1 - a)], rows[prediction]])
    x0, e = np.linalg.solve(matrix, np.stack([np.ravel(x), np.ravel(output)]))
    return x0.reshape(np.shape(x)), e.reshape(np.shape(x))


def ancestral(x0: Array, x: Array, a: float, a_prev: float) -> tuple[Array, float]:
    """Mean and deviation of x' given x and x0, with x' ~ N(sqrt(a') x0, 1 - a') and x ~ N(sqrt(r) x', 1 - r), r = a/a'.

    Two Gaussian opinions on x' are merged by their precisions. It is DDIM with eta 1 (DDPM's posterior).
    """
    ratio = a / a_prev
    forward, backward = 1 / (1 - a_prev), ratio / (1 - ratio)
    mean = (forward * math.sqrt(a_prev) * x0 + backward * x / math.sqrt(ratio)) / (forward + backward)
    return mean, 1 / math.sqrt(forward + backward)


def logprob(x: Array, mean: Array, std: float) -> Array:
    """Logarithm of the density of each row, over the number of its dimensions."""
    density = np.exp(-(((x - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    return np.log(density).reshape(len(x), -1).mean(axis=1)


def kl(mean: Array, ref_mean: Array, std: float, points: int = 4001) -> Array:
    """KL of two normal distributions over the number of dimensions, by numerical integration."""
    grid = np.linspace(-12, 12, points)

    def one(mu: float, nu: float) -> float:
        z = mu + std * grid
        p = np.exp(-(grid**2) / 2) / (std * math.sqrt(2 * math.pi))
        return float(np.trapezoid(p * ((z - nu) ** 2 - (z - mu) ** 2) / (2 * std**2), z))

    each = [one(m, n) for m, n in zip(np.ravel(mean), np.ravel(ref_mean), strict=True)]
    return np.array(each).reshape(len(mean), -1).mean(axis=1)
