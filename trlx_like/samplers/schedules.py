"""The steps from noise to an image, each a Gaussian to draw from and to score with: one `step` for both.

A schedule is made from a diffusers scheduler's settings; the scheduler itself stays in the pipeline as it is.

x and all that is computed of it are float32 at least, whatever the model computes in. The x' that `step` scores is the
one it returns, already rounded to x's dtype, so a log-probability is of what is stored.
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
    """Of one denoising step of each row."""

    prev: Tensor  # [B, *x], what the step leads to
    logprob: Tensor  # [B] float32, mean over the dimensions of x
    mean: Tensor  # [B, *x] float32
    std: Tensor  # [B, 1, ...] float32


class Schedule(ABC):
    """S steps, numbered from 0 at pure noise. Tables are on the CPU."""

    timesteps: Tensor  # [S], what the model is told
    stds: Tensor  # [S] float64

    def __len__(self) -> int:
        return len(self.timesteps)

    @property
    def stochastic_steps(self) -> Tensor:
        """The steps that have a log-probability: x' is drawn there, not computed. [A] int64"""
        return self.stds.nonzero().flatten()

    def times(self, t: Tensor) -> Tensor:
        """What the model is told at steps t [B]. [B]"""
        return self.timesteps[t.cpu()].to(t.device)

    def step(self, model_output: Tensor, t: Tensor, x: Tensor, prev: Tensor | None = None) -> Step:
        """Draws x' (random numbers of torch, on x's device), or scores `prev` in its place.

        model_output, x, prev: [B, *x]. t: the number of the step of each row, [B] int64.
        """
        mean = self.mean(model_output.float(), t, x.float())
        std = _at(self.stds, t, mean).float()
        if prev is None:
            # Rounded before it is scored: what is stored is what was drawn.
            prev = (mean + std * torch.randn_like(mean)).detach().to(x.dtype)
        return Step(prev, gaussian_logprob(prev.float(), mean, std), mean, std)

    @abstractmethod
    def mean(self, output: Tensor, t: Tensor, x: Tensor) -> Tensor:
        """Where the steps lead on average. output, x: [B, *x] float32, t: [B] -> [B, *x]."""


class DDIMSchedule(Schedule):
    """DDIM with noise (Song et al. 2020): eta 1 is ancestral sampling.

    scheduler: any of diffusers that DDIM can take its settings from. Each step leads to the level of noise that the
    next one starts from. diffusers' own step assumes it N/S lower, which with spacing "linspace" is another one.
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
        alpha, alpha_prev, std = (_at(table, t, x) for table in (self.alphas, self.alphas_prev, self.stds))
        clean, noise = clean_and_noise(output, x, alpha, self.prediction)
        if self.limit is not None:
            clean = clean.clamp(-self.limit, self.limit)
            if self.use_clipped_model_output:
                _, noise = clean_and_noise(clean, x, alpha, "sample")
        return ddim_mean(clean, noise, alpha_prev, std)


class FlowSchedule(Schedule):
    """The SDE of Flow-GRPO (Liu et al. 2025) for flow matching: the deviation of a step grows with `noise_level`.

    scheduler: diffusers' FlowMatchEulerDiscreteScheduler.
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
        rate, sigma, sigma_prev = (_at(table, t, x) for table in (self.rates, self.sigmas, self.sigmas_prev))
        return flow_sde_mean(output, x, rate, sigma, sigma_prev)


def _ddim(scheduler: Any, steps: int) -> Any:
    """diffusers' DDIMScheduler with the settings of another one, its timesteps set."""
    from diffusers import DDIMScheduler

    # Schedulers that do not know the setting do not clip, and DDIM's own default does.
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
    """Entries of a table [S] at t [B], for broadcasting. [B, 1, ...] of `like`'s device"""
    entries = table[t.cpu()].reshape(-1, *[1] * (like.dim() - 1))
    return entries.float().to(like.device) if like.device.type == "mps" else entries.to(like.device)
