"""Denoising schedules: each step from noise to image is a Gaussian, to sample from and to score with.

A schedule is made from the settings of a diffusers scheduler, which itself stays in the pipeline unchanged. All
computations are at least float32, whatever the model computes in. `step` scores the x' that it returns, already
rounded to the dtype of x, so log-probabilities are those of the stored values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from trlx_like.errors import ConfigError
from trlx_like.functional.diffusion import (
    Prediction,
    clean_and_noise,
    ddim_mean,
    ddim_std,
    flow_sde_mean,
    flow_sde_rate,
    flow_sde_std,
    gaussian_logprob,
)


class Step(NamedTuple):
    """Hold the result of one denoising step for each row."""

    prev: Tensor  # [B, *x], the latents x' after the step
    logprob: Tensor  # [B] float32, mean over the dimensions of x
    mean: Tensor  # [B, *x] float32
    std: Tensor  # [B, 1, ...] float32


class Schedule(ABC):
    """Define a sequence of S denoising steps, numbered from 0 (pure noise). Its tables are on the CPU."""

    timesteps: Tensor  # [S], the timestep that the model gets as input
    stds: Tensor  # [S] float64

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return len(self.timesteps)

    @property
    def stochastic_steps(self) -> Tensor:
        """Return the numbers of the steps with noise; deterministic steps have no log-probability. [A] int64"""
        return self.stds.nonzero().flatten()

    def times(self, t: Tensor) -> Tensor:
        """Return the timesteps that the model gets as input at steps t. Shapes: [B] -> [B]."""
        return self.timesteps[t.cpu()].to(t.device)

    def step(
        self, model_output: Tensor, t: Tensor, x: Tensor, prev: Tensor | None = None, *, noise: Tensor | None = None
    ) -> Step:
        """Sample the next latents x', or score given ones.

        Args:
            model_output: The model's output at x. [B, *x]
            t: The number of each row's step. [B] int64
            x: Latents before the step. [B, *x]
            prev: The latents after the step to score; None samples them. [B, *x]
            noise: Standard normal numbers to sample with; None draws them with torch's global generator. [B, *x]

        Returns:
            x', its log-probability, and mean and standard deviation of the step.
        """
        mean = self.mean(model_output.float(), t, x.float())
        std = _at(self.stds, t, mean).float()
        if prev is None:
            # Round before scoring: the log-probability must be that of the stored value.
            drawn = torch.randn_like(mean) if noise is None else noise
            prev = (mean + std * drawn).detach().to(x.dtype)
        return Step(prev, gaussian_logprob(prev.float(), mean, std), mean, std)

    @abstractmethod
    def mean(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """Compute the mean of x'.

        Args:
            output: The model's output at x. [B, *x] float32
            t: The number of each row's step. [B] int64
            x: Latents before the step. [B, *x] float32

        Returns:
            The means. [B, *x]
        """


class DDIMSchedule(Schedule):
    """Denoise with the stochastic steps of DDIM (Song et al. 2020).

    Each step leads to the noise level at which the next one starts. The step of diffusers always goes down by N/S of
    the N training timesteps, which is not where the next one starts with timestep spacing "linspace".

    Args:
        scheduler: A diffusers scheduler whose settings `DDIMScheduler.from_config` accepts.
        steps: The number of steps, S.
        eta: Strength of the noise: 0 is deterministic, 1 is ancestral sampling.
        use_clipped_model_output: Whether the noise is computed again from the clipped image, as in diffusers.

    Raises:
        ConfigError: For settings that cannot be trained with.
    """

    def __init__(self, scheduler: Any, steps: int, eta: float, *, use_clipped_model_output: bool = False) -> None:
        made = _ddim(scheduler, steps)
        self.prediction = made.config.prediction_type
        self.limit = made.config.clip_sample_range if made.config.clip_sample else None
        self.use_clipped_model_output = use_clipped_model_output
        self.timesteps = made.timesteps
        self.alphas = made.alphas_cumprod.double()[made.timesteps]  # [S]
        self.alphas_prev = torch.cat([self.alphas[1:], made.final_alpha_cumprod.double().reshape(1)])  # [S]
        if self.prediction == "epsilon" and not self.alphas.all():
            raise ConfigError(
                f"the pipeline's scheduler has no signal left at step {int(self.timesteps[0])} (rescale_betas_zero_snr)"
                ", where a prediction of the noise says nothing; it needs prediction_type v_prediction or sample."
            )
        self.stds = ddim_std(self.alphas, self.alphas_prev, eta)

    def mean(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """Compute the mean of x', see `Schedule.mean`."""
        alpha, alpha_prev, std = (_at(table, t, x) for table in (self.alphas, self.alphas_prev, self.stds))
        clean, noise = clean_and_noise(output, x, alpha, self.prediction)
        if self.limit is not None:
            clean = clean.clamp(-self.limit, self.limit)
            if self.use_clipped_model_output:
                _, noise = clean_and_noise(clean, x, alpha, "sample")
        return ddim_mean(clean, noise, alpha_prev, std)


class FlowSchedule(Schedule):
    """Denoise flow matching models with the SDE of Flow-GRPO (Liu et al. 2025).

    Args:
        scheduler: A `FlowMatchEulerDiscreteScheduler` of diffusers.
        steps: The number of steps, S.
        noise_level: Strength of the noise; 0 is the deterministic flow.

    Raises:
        ConfigError: For settings that cannot be trained with.
    """

    def __init__(self, scheduler: Any, steps: int, noise_level: float) -> None:
        if scheduler.config.use_dynamic_shifting or scheduler.config.invert_sigmas:
            raise ConfigError(
                "the pipeline's scheduler has use_dynamic_shifting or invert_sigmas, which cannot be trained with here."
            )
        made = type(scheduler).from_config(scheduler.config)
        made.set_timesteps(steps)
        self.timesteps = made.timesteps
        sigmas = made.sigmas.double()  # [S + 1]
        self.sigmas, self.sigmas_prev = sigmas[:-1], sigmas[1:]
        self.rates = flow_sde_rate(self.sigmas, noise_level, float(sigmas[1]))
        self.stds = flow_sde_std(self.rates, self.sigmas, self.sigmas_prev)

    def mean(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """Compute the mean of x', see `Schedule.mean`."""
        rate, sigma, sigma_prev = (_at(table, t, x) for table in (self.rates, self.sigmas, self.sigmas_prev))
        return flow_sde_mean(output, x, rate, sigma, sigma_prev)


def _ddim(scheduler: Any, steps: int) -> Any:
    """Make a DDIMScheduler of diffusers with the settings of another scheduler, and set its timesteps."""
    from diffusers import DDIMScheduler

    # Schedulers without this setting do not clip, but DDIMScheduler does by default.
    made = DDIMScheduler.from_config(scheduler.config, clip_sample=scheduler.config.get("clip_sample", False))
    if made.config.thresholding:
        raise ConfigError("the pipeline's scheduler has thresholding: true, which cannot be trained with here.")
    if made.config.prediction_type not in get_args(Prediction):
        raise ConfigError(
            f"the pipeline's scheduler has prediction_type {made.config.prediction_type!r}; "
            f"{', '.join(get_args(Prediction))} can be trained with."
        )
    if steps > made.config.num_train_timesteps:
        raise ConfigError(
            f"method.num_inference_steps ({steps}) is above the {made.config.num_train_timesteps} that the pipeline's "
            "scheduler has."
        )
    made.set_timesteps(steps)
    return made


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Look up entries of a table [S] at steps t [B], shaped to broadcast against `like`. [B, 1, ...]"""
    entries = table[t.cpu()].reshape(-1, *[1] * (like.dim() - 1))
    return entries.float().to(like.device) if like.device.type == "mps" else entries.to(like.device)
