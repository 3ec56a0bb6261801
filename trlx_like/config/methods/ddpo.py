"""Options of DDPO, from its authors' code, TRL's DDPOTrainer, and Flow-GRPO for flow matching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from trlx_like.config.method import MethodConfig, Sections
from trlx_like.config.problems import Problem, at, shown
from trlx_like.config.resume import Applied, OfReference, OfRollouts, OfRound, OfState


class DDPOConfig(MethodConfig):
    """Policy gradients on the denoising steps of a diffusion model (Black et al. 2023)."""

    arch_types: ClassVar[tuple[str, ...]] = ("diffusion",)

    num_inference_steps: OfRollouts[int] = Field(default=50, ge=1)
    """Number of denoising steps for each image."""
    eta: OfRollouts[float] = Field(default=1.0, gt=0, le=1)
    """Noise of each DDIM step, as a fraction of the noise of ancestral (DDPM) sampling."""
    noise_level: OfRollouts[float] = Field(default=0.7, gt=0)
    """Noise of each step of a flow-matching model (such as SD3), which does not use `eta`."""
    guidance_scale: OfRollouts[float] = Field(default=5.0, ge=0)
    """Scale of classifier-free guidance towards the prompt; 1 or below: no guidance."""
    negative_prompt: OfRollouts[str | None] = None
    """Text that guidance leads away from; null: the pipeline's own. A prompt's "negative_prompt" overrides it."""
    use_clipped_model_output: OfRollouts[bool] = False
    """Compute the noise from the clipped image, if the pipeline's scheduler clips images (`clip_sample`)."""
    height: OfRollouts[int | None] = Field(default=None, ge=1)
    """Height of images in pixels; null: the pipeline's default."""
    width: OfRollouts[int | None] = Field(default=None, ge=1)
    """Width of images in pixels; null: the pipeline's default."""
    vae_slicing: Applied[bool] = True
    """Decode one image at a time, which takes less memory."""

    num_samples: OfRound[int] = Field(default=256, ge=1)
    """Number of images in each round, over all processes."""
    num_generations: OfRound[int] = Field(default=1, ge=1)
    """Number of images for each prompt of a round."""
    chunk_size: Applied[int] = Field(default=8, ge=1)
    """Number of prompts to make and score images for at once, per process."""
    image_type: Applied[Literal["pil", "tensor"]] = "pil"
    """Form of the images for the reward function: a list of PIL images, or a tensor [B, C, H, W] in [0, 1]."""

    advantages: OfState[Literal["prompt", "round", "group"]] = "prompt"
    """Rewards to compare with: earlier ones of the same prompt, all of the round, or of the prompt's group."""
    stat_buffer_size: OfState[int] = Field(default=16, ge=1)
    """Number of newest rewards of each prompt that are kept to compare with."""
    stat_min_count: Applied[int] = Field(default=16, ge=1)
    """Minimum number of rewards of a prompt; with fewer, rewards of the whole round are compared with."""
    adv_clip: Applied[float] = Field(default=5.0, gt=0)
    """Largest absolute value of an advantage; larger ones are clipped."""

    loss_type: Applied[Literal["clip", "score_function"]] = "clip"
    """Loss: PPO's clipped ratio (clip) or REINFORCE without a ratio (score_function)."""
    cliprange: Applied[float] = Field(default=1.0e-4, gt=0)
    """Clipping range of a step's probability ratio around 1; small, as the ratio is a mean over dimensions."""
    inner_epochs: OfRound[int] = Field(default=1, ge=1)
    """Number of passes over the images of a round."""
    timestep_fraction: OfRound[float] = Field(default=1.0, gt=0, le=1)
    """Fraction of the denoising steps that a pass learns from, chosen at random for each image."""
    train_cfg: OfRollouts[bool] = True
    """Train the model with guidance; false: train it without, on images that were made with guidance."""
    guidance_gradient: OfRollouts[bool] = True
    """Train the prediction for the negative prompt too, if training is with guidance."""
    beta: OfReference[float] = Field(default=0.0, ge=0)
    """Weight of the KL of each step to the model before training; 0: no KL, and no second set of weights."""

    grid_interval: Applied[int | None] = Field(default=None, ge=1)
    """Number of rounds between two grids of images in the logs; null: no grids of rounds."""

    def conflicts(self) -> Iterator[Problem]:
        if self.num_samples % self.num_generations:
            yield at(
                "method.num_generations", f"{self.num_generations} does not divide num_samples ({self.num_samples})."
            )
        if self.advantages == "group" and self.num_generations < 2:
            yield at("method.num_generations", "1 leaves nothing to compare an image with; use 2 or more.")
        if self.advantages == "prompt" and self.stat_min_count > self.stat_buffer_size:
            yield at(
                "method.stat_min_count",
                f"{self.stat_min_count} is above method.stat_buffer_size ({self.stat_buffer_size}) and never reached.",
            )
        if self.loss_type == "score_function" and self.inner_epochs > 1:
            yield at("method.inner_epochs", f"{self.inner_epochs} passes need a ratio; use 1 or loss_type clip.")

    def conflicts_with(self, config: Sections) -> Iterator[Problem]:
        for name in ("num_layers_unfrozen", "ref_model_path"):
            if config.model.changed(name):
                value = shown(getattr(config.model, name))
                yield at(
                    f"model.{name}",
                    f"{value} is not for images: all of the model or a LoRA is trained, and held close to its start.",
                )

    def acting(self) -> dict[str, bool]:
        guided = self.guidance_scale > 1
        return {
            **dict.fromkeys(("stat_buffer_size", "stat_min_count"), self.advantages == "prompt"),
            "cliprange": self.loss_type == "clip",
            **dict.fromkeys(("negative_prompt", "train_cfg"), guided),
            "guidance_gradient": guided and self.train_cfg,
        }
