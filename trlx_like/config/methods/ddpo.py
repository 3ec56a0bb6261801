"""Options of DDPO: those of its authors' code and of TRL's DDPOTrainer, and of Flow-GRPO for flow matching."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from trlx_like.config.method import MethodConfig, Sections
from trlx_like.config.problems import Problem, shown


class DDPOConfig(MethodConfig):
    """Policy gradients on the denoising steps of a diffusion model (Black et al. 2023)."""

    arch_types: ClassVar[tuple[str, ...]] = ("diffusion",)

    num_inference_steps: int = Field(default=50, ge=1)
    """Denoising steps of an image."""
    eta: float = Field(default=1.0, gt=0, le=1)
    """Noise of a step of DDIM, as a share of that of ancestral sampling."""
    noise_level: float = Field(default=0.7, gt=0)
    """Noise of a step of a flow-matching model (SD3), in place of `eta`."""
    guidance_scale: float = Field(default=5.0, ge=0)
    """Weight of the prompt against the negative prompt; 1 or below: no guidance."""
    negative_prompt: str | None = None
    """What guidance leads away from; null: the pipeline's own. A prompt's key "negative_prompt" goes before it."""
    use_clipped_model_output: bool = False
    """Take the noise from the clipped image, where the pipeline's scheduler clips it (`clip_sample`)."""
    height: int | None = Field(default=None, ge=1)
    """Pixels; null: as the pipeline makes them by default."""
    width: int | None = Field(default=None, ge=1)
    """Pixels; null: as the pipeline makes them by default."""
    vae_slicing: bool = True
    """Decode one image at a time, for less memory."""

    num_samples: int = Field(default=256, ge=1)
    """Images of a round, over all processes."""
    num_generations: int = Field(default=1, ge=1)
    """Images to each prompt of a round."""
    chunk_size: int = Field(default=8, ge=1)
    """Prompts whose images are made and scored at once, per process."""
    image_type: Literal["pil", "tensor"] = "pil"
    """What the reward function gets: a list of PIL images, or one tensor [B, C, H, W] in [0, 1]."""

    advantages: Literal["prompt", "round", "group"] = "prompt"
    """What a reward is compared with: earlier ones of its prompt, all of its round, or the others of its group."""
    stat_buffer_size: int = Field(default=16, ge=1)
    """Newest rewards of a prompt that are kept to compare with."""
    stat_min_count: int = Field(default=16, ge=1)
    """Rewards of a prompt below which those of the whole round are compared with."""
    adv_clip: float = Field(default=5.0, gt=0)
    """Advantages are clipped to this distance from 0."""

    loss_type: Literal["clip", "score_function"] = "clip"
    """PPO's clipped ratio, or REINFORCE without a ratio."""
    cliprange: float = Field(default=1.0e-4, gt=0)
    """The probability ratio of a step is clipped to 1 +- this; it is of the mean over dimensions, hence so small."""
    inner_epochs: int = Field(default=1, ge=1)
    """Passes over the images of a round."""
    timestep_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the denoising steps that a pass learns from, chosen at random for each image."""
    train_cfg: bool = True
    """Learn with guidance; false: the model without it, from images made with it."""
    guidance_gradient: bool = True
    """Learn what to say to the negative prompt too, when learning with guidance."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL of a step to the model before training; 0: none, and no second set of weights is kept."""

    grid_interval: int | None = Field(default=None, ge=1)
    """Rounds between those whose first images are shown, as those of evaluations are; null: none."""

    def conflicts(self) -> Iterator[Problem]:
        if self.num_samples % self.num_generations:
            yield _problem(
                "num_generations", f"{self.num_generations} does not divide num_samples ({self.num_samples})."
            )
        if self.advantages == "group" and self.num_generations < 2:
            yield _problem("num_generations", "1 leaves nothing to compare an image with; use 2 or more.")
        if self.advantages == "prompt" and self.stat_min_count > self.stat_buffer_size:
            yield _problem(
                "stat_min_count",
                f"{self.stat_min_count} is above method.stat_buffer_size ({self.stat_buffer_size}) and never reached.",
            )
        if self.loss_type == "score_function" and self.inner_epochs > 1:
            yield _problem("inner_epochs", f"{self.inner_epochs} passes need a ratio; use 1 or loss_type clip.")

    def conflicts_with(self, config: Sections) -> Iterator[Problem]:
        for name in ("num_layers_unfrozen", "ref_model_path"):
            if config.model.changed(name):
                value = shown(getattr(config.model, name))
                yield Problem(
                    ("model", name),
                    f"{value} is not for images: all of the model or a LoRA is trained, and held close to its start.",
                )

    def inert(self) -> list[str]:
        guided = self.guidance_scale > 1
        acts = {
            "stat_buffer_size": self.advantages == "prompt",
            "stat_min_count": self.advantages == "prompt",
            "cliprange": self.loss_type == "clip",
            "negative_prompt": guided,
            "train_cfg": guided,
            "guidance_gradient": guided and self.train_cfg,
        }
        return [name for name, does in acts.items() if not does and self.changed(name)]


def _problem(name: str, text: str) -> Problem:
    return Problem(("method", name), text)
