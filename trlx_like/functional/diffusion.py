"""Denoising steps as Gaussians: mean, standard deviation, log-density and KL divergence.

One step samples a less noisy x' from N(mean, std^2), given x. The model and the choice of timesteps are left out on
purpose: they are in `samplers/schedules.py`. Noise levels (alpha, sigma) are float64 tensors that broadcast against x.
Square roots are taken before the result is rounded to the dtype of x, because 1 - alpha can be too small for float32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "sample"]


def clean_and_noise(output: Tensor, x: Tensor, alpha: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Recover the clean image x0 and the noise e of x = sqrt(a) x0 + sqrt(1 - a) e from a model's output.

    Source: Song et al. 2020, arXiv:2010.02502 (DDIM), eq. 9; Salimans and Ho 2022, arXiv:2202.00512, appendix D, for v.

    Args:
        output: The model's output at x. [B, *x]
        x: The noisy image or latents. [B, *x]
        alpha: The cumulative product a_t of the noise schedule. [B, 1, ...]
        prediction: What the output is: "epsilon" is e, "sample" is x0, "v_prediction" is
            v = sqrt(a) e - sqrt(1 - a) x0.

    Returns:
        x0 and e. Each [B, *x]
    """
    signal, noise = _root(alpha, x), _root(1 - alpha, x)
    if prediction == "epsilon":
        return (x - noise * output) / signal, output
    if prediction == "sample":
        return output, (x - signal * output) / noise
    return signal * x - noise * output, signal * output + noise * x


def ddim_std(alpha: Tensor, alpha_prev: Tensor, eta: float) -> Tensor:
    """Compute the standard deviation of a DDIM step: s = eta sqrt((1 - a') / (1 - a)) sqrt(1 - a / a').

    Source: Song et al. 2020, arXiv:2010.02502, eq. 16.

    Args:
        alpha: The cumulative product a before the step. [*]
        alpha_prev: The cumulative product a' after the step, the less noisy one. [*]
        eta: 0 is deterministic DDIM, 1 is ancestral sampling (DDPM).

    Returns:
        The standard deviation s. [*]
    """
    return eta * ((1 - alpha_prev) / (1 - alpha) * (1 - alpha / alpha_prev)).clamp(min=0).sqrt()


def ddim_mean(clean: Tensor, noise: Tensor, alpha_prev: Tensor, std: Tensor) -> Tensor:
    """Compute the mean of a DDIM step: sqrt(a') x0 + sqrt(1 - a' - s^2) e.

    Source: Song et al. 2020, arXiv:2010.02502, eq. 12.

    Args:
        clean: The predicted clean image x0. [B, *x]
        noise: The predicted noise e. [B, *x]
        alpha_prev: The cumulative product a' after the step. [B, 1, ...]
        std: The standard deviation s of the step. [B, 1, ...]

    Returns:
        The mean of x'. [B, *x]

    Difference: a negative 1 - a' - s^2 counts as 0. It is 0 for eta 1 at zero signal, and rounding may make it
    negative.
    """
    return _root(alpha_prev, clean) * clean + _root(1 - alpha_prev - std.square(), clean) * noise


def flow_sde_rate(sigma: Tensor, level: float, below_one: float) -> Tensor:
    """Compute the noise of Flow-GRPO's SDE per square root of time: g = level sqrt(sigma / (1 - sigma)).

    Source: Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), sec. 4.2, and `sd3_sde_with_logprob.py` at ac4c86e.

    Args:
        sigma: The noise level, from 1 (pure noise) to 0. [*]
        level: The strength of the noise; 0 makes the SDE an ODE.
        below_one: The value used for sigma in 1 - sigma where sigma is 1, to avoid dividing by 0. In the source it is
            the second sigma of the schedule.

    Returns:
        The rate g. [*]
    """
    capped = torch.where(sigma == 1, below_one, sigma)
    return level * (sigma / (1 - capped)).sqrt()


def flow_sde_std(rate: Tensor, sigma: Tensor, sigma_prev: Tensor) -> Tensor:
    """Compute the standard deviation of one step of Flow-GRPO's SDE: s = g sqrt(sigma - sigma').

    Source: Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), eq. 9.

    Args:
        rate: The rate g from `flow_sde_rate`. [*]
        sigma: The noise level before the step. [*]
        sigma_prev: The noise level sigma' after the step, the lower one. [*]

    Returns:
        The standard deviation s. [*]
    """
    return rate * (sigma - sigma_prev).sqrt()


def flow_sde_mean(velocity: Tensor, x: Tensor, rate: Tensor, sigma: Tensor, sigma_prev: Tensor) -> Tensor:
    """Compute the mean of one step of Flow-GRPO's SDE: x + [v + g^2 / (2 sigma) (x + (1 - sigma) v)] dt.

    Here x = (1 - sigma) x0 + sigma e, the model predicts v = e - x0, and dt = sigma' - sigma < 0. This is one
    Euler-Maruyama step of an SDE that has the same marginal distributions as the flow dx = v dt.

    Source: Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), eq. 9.

    Args:
        velocity: The model's output v. [B, *x]
        x: The noisy image or latents. [B, *x]
        rate: The rate g from `flow_sde_rate`. [B, 1, ...]
        sigma: The noise level before the step. [B, 1, ...]
        sigma_prev: The noise level sigma' after the step, the lower one. [B, 1, ...]

    Returns:
        The mean of x'. [B, *x]
    """
    dt = sigma_prev - sigma
    pull = rate.square() / (2 * sigma)
    return (1 + pull * dt).to(x.dtype) * x + ((1 + pull * (1 - sigma)) * dt).to(x.dtype) * velocity


def gaussian_logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Compute the log-density of N(mu, s^2) at x, averaged over dimensions.

    Per dimension it is -(x - mu)^2 / (2 s^2) - log s - log sqrt(2 pi).

    Source: Black et al. 2023, arXiv:2305.13301 (DDPO), eq. 4.

    Args:
        x: The point. [B, *x]
        mean: The mean mu. [B, *x]
        std: The standard deviation s. [B, 1, ...]

    Returns:
        The mean log-density of each row; 0 where s is 0, since a deterministic step has no density. [B]

    Difference: the paper sums over dimensions. Its code (ddpo-pytorch @1958463 `ddim_with_logprob.py:184-190`)
    averages, as here, and its clip range of 1e-4 is meant for the average.
    """
    drawn = std > 0
    safe = torch.where(drawn, std, 1)
    density = -((x - mean) / safe).square() / 2 - safe.log() - math.log(math.sqrt(2 * math.pi))
    return torch.where(drawn, density, 0).flatten(1).mean(dim=1)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """Compute KL(N(mu, s^2) || N(mu_ref, s^2)), averaged over dimensions: (mu - mu_ref)^2 / (2 s^2).

    Source: Fan et al. 2023, arXiv:2305.16381 (DPOK), sec. 4.2; Liu et al. 2025, arXiv:2505.05470 (Flow-GRPO), sec. 4.1.

    Args:
        mean: The policy's mean mu. [B, *x]
        ref_mean: The reference's mean mu_ref. [B, *x]
        std: The standard deviation s of both. [B, 1, ...]

    Returns:
        The mean KL of each row; 0 where s is 0. [B]

    Difference: the papers sum over dimensions. The average is on the same scale as `gaussian_logprob`.
    """
    drawn = std > 0
    distance = ((mean - ref_mean) / torch.where(drawn, std, 1)).square() / 2
    return torch.where(drawn, distance, 0).flatten(1).mean(dim=1)


def guided(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """Combine two model outputs by classifier-free guidance: e_u + w (e_c - e_u).

    Source: Ho and Salimans 2022, arXiv:2207.12598, eq. 6, with w = 1 + theirs.

    Args:
        unconditional: The output e_u without the prompt, or for the negative prompt. [*]
        conditional: The output e_c for the prompt. [*]
        scale: The guidance scale w; 1 is no guidance.

    Returns:
        The guided output. [*]
    """
    return unconditional + scale * (conditional - unconditional)


def _root(value: Tensor, like: Tensor) -> Tensor:
    """Take the square root in float64 and round it to the dtype of `like`."""
    return value.clamp(min=0).sqrt().to(like.dtype)
