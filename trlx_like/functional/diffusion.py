"""Denoising steps as Gaussians: mean and deviation, log-density, divergence.

A step leads from x to a less noisy x' ~ N(mean, std^2). Left out on purpose: which steps there are, and the model
(`samplers/schedules.py`). The levels of noise (alpha, sigma) are float64 tensors that broadcast against x; roots are
taken of them before they are rounded to x's dtype, since 1 - alpha is small where float32 is coarse.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "sample"]


def clean_and_noise(output: Tensor, x: Tensor, alpha: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """What a model's output says of x = sqrt(a) x0 + sqrt(1 - a) e: the clean x0 and the noise e.

    epsilon: the output is e. sample: it is x0. v_prediction: it is v = sqrt(a) e - sqrt(1 - a) x0.

    Source: Song et al. 2020, arXiv:2010.02502 (DDIM), eq. 9; Salimans and Ho 2022, arXiv:2202.00512, appendix D, for v.
    Shapes: output, x [B, *x], alpha (the cumulative product a_t) [B, 1, ...] -> two [B, *x].
    """
    signal, noise = _root(alpha, x), _root(1 - alpha, x)
    if prediction == "epsilon":
        return (x - noise * output) / signal, output
    if prediction == "sample":
        return output, (x - signal * output) / noise
    return signal * x - noise * output, signal * output + noise * x


def ddim_std(alpha: Tensor, alpha_prev: Tensor, eta: float) -> Tensor:
    """s = eta sqrt((1 - a') / (1 - a)) sqrt(1 - a / a').

    Source: Song et al. 2020, arXiv:2010.02502, eq. 16. Shapes: both [*] -> [*]. eta 1 is ancestral sampling, 0 is DDIM.
    """
    return eta * ((1 - alpha_prev) / (1 - alpha) * (1 - alpha / alpha_prev)).clamp(min=0).sqrt()


def ddim_mean(clean: Tensor, noise: Tensor, alpha_prev: Tensor, std: Tensor) -> Tensor:
    """sqrt(a') x0 + sqrt(1 - a' - s^2) e.

    Source: Song et al. 2020, arXiv:2010.02502, eq. 12. Shapes: clean, noise [B, *x], alpha_prev, std [B, 1, ...]
    -> [B, *x]. With eta 1 at zero signal s^2 = 1 - a', and rounding must not make the root that of a negative number.
    """
    return _root(alpha_prev, clean) * clean + _root(1 - alpha_prev - std.square(), clean) * noise


def flow_sde_rate(sigma: Tensor, level: float, below_one: float) -> Tensor:
    """g = level sqrt(sigma / (1 - sigma)), the noise of the SDE per root of time; sigma = 1 counts as `below_one`.

    Source: Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), sec. 4.2, and `sd3_sde_with_logprob.py` at ac4c86e, where
    below_one is the second sigma of the schedule. Shapes: [*] -> [*].
    """
    capped = torch.where(sigma == 1, below_one, sigma)
    return level * (sigma / (1 - capped)).sqrt()


def flow_sde_std(rate: Tensor, sigma: Tensor, sigma_prev: Tensor) -> Tensor:
    """s = g sqrt(sigma - sigma'). Shapes: all [*] -> [*]. Source: as `flow_sde_mean`."""
    return rate * (sigma - sigma_prev).sqrt()


def flow_sde_mean(velocity: Tensor, x: Tensor, rate: Tensor, sigma: Tensor, sigma_prev: Tensor) -> Tensor:
    """x + [v + g^2 / (2 sigma) (x + (1 - sigma) v)] dt, with dt = sigma' - sigma < 0: one Euler-Maruyama step.

    x = (1 - sigma) x0 + sigma e, and v = e - x0 is what the model says. The SDE has the marginals of the flow
    dx = v dt, in the limit of small steps.

    Source: Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), eq. 9. Shapes: velocity, x [B, *x], others [B, 1, ...]
    -> [B, *x].
    """
    dt = sigma_prev - sigma
    pull = rate.square() / (2 * sigma)
    return (1 + pull * dt).to(x.dtype) * x + ((1 + pull * (1 - sigma)) * dt).to(x.dtype) * velocity


def gaussian_logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """mean over dimensions of [-(x - mu)^2 / (2 s^2) - log s - log sqrt(2 pi)], 0 where s is 0: there is no density.

    Source: Black et al. 2023, arXiv:2305.13301 (DDPO), eq. 4. Shapes: x, mean [B, *x], std [B, 1, ...] -> [B].

    Difference: the paper sums over dimensions; its code (ddpo-pytorch @1958463 `ddim_with_logprob.py:184-190`) takes
    the mean, as here, and its clip range of 1e-4 is for the mean.
    """
    drawn = std > 0
    safe = torch.where(drawn, std, 1)
    density = -((x - mean) / safe).square() / 2 - safe.log() - math.log(math.sqrt(2 * math.pi))
    return torch.where(drawn, density, 0).flatten(1).mean(dim=1)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """mean over dimensions of KL(N(mu, s^2) || N(mu_ref, s^2)) = (mu - mu_ref)^2 / (2 s^2); 0 where s is 0.

    Source: Fan et al. 2023, arXiv:2305.16381 (DPOK), sec. 4.2; Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), sec. 4.1.
    Shapes: mean, ref_mean [B, *x], std [B, 1, ...] -> [B]. A mean, so that it weighs as `gaussian_logprob` does.
    """
    drawn = std > 0
    distance = ((mean - ref_mean) / torch.where(drawn, std, 1)).square() / 2
    return torch.where(drawn, distance, 0).flatten(1).mean(dim=1)


def guided(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """e_u + w (e_c - e_u).

    Source: Ho and Salimans 2022, arXiv:2207.12598 (classifier-free guidance), eq. 6, with w = 1 + theirs. Shapes:
    both [*] -> [*].
    """
    return unconditional + scale * (conditional - unconditional)


def _root(value: Tensor, like: Tensor) -> Tensor:
    return value.clamp(min=0).sqrt().to(like.dtype)
