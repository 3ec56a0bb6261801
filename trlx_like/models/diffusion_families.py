"""Families of text-to-image pipelines: how each encodes prompts and calls its denoising model.

`FAMILIES` maps class names of pipelines to families. A pipeline of another class must be derived from one of these, or
be registered with `register_diffusion_family`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.imports import called_by_name, is_python_name, needed
from trlx_like.models.finite import require_finite
from trlx_like.models.sources import check_place, loadable, no_progress_bars, reason
from trlx_like.registry import Registry


class Family(ABC):
    """Base class of what differs between families of pipelines.

    Args:
        pipeline: The pipeline.
        size: Height and width of images in pixels.
    """

    part: str = "unet"
    """The attribute of the pipeline that is the denoising model."""
    flow: bool = False
    """True for flow matching models, which are sampled with `FlowSchedule` instead of `DDIMSchedule`."""
    upcast_vae: bool = False
    """True if the VAE overflows in float16 when its configuration has `force_upcast` (which is also the default)."""

    def __init__(self, pipeline: Any, size: tuple[int, int]) -> None:
        self.pipeline = pipeline
        self.size = size  # (height, width) of images, in pixels

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        """Encode prompts, by default with the pipeline's own `encode_prompt`.

        Args:
            prompts: The prompts.
            negatives: Their negative prompts; None is the pipeline's own.
            options: `device` and `do_classifier_free_guidance`, and others of the pipeline's `encode_prompt`.

        Returns:
            Four tensors as `encode_prompt` of SDXL returns them: embeddings, negative embeddings, pooled embeddings,
            negative pooled embeddings. Each [B, ...], or None.
        """
        texts = {"prompt": prompts, "negative_prompt": negatives}
        found: tuple[Tensor | None, ...] = self.pipeline.encode_prompt(**texts, num_images_per_prompt=1, **options)
        return found

    @abstractmethod
    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """Call the denoising model.

        Args:
            model: The denoising model.
            x: Noisy latents. [B, *x]
            times: Their timesteps. [B]
            embeds: Embeddings of the prompts. [B, ...]
            pooled: Pooled embeddings of the prompts [B, H], or None.

        Returns:
            The model's output. [B, *x]
        """


class StableDiffusion(Family):
    """Stable Diffusion 1.x and 2.x."""

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        """Encode prompts, see `Family.encode`. There are no pooled embeddings."""
        return *super().encode(prompts, negatives, **options), None, None

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """Call the UNet, see `Family.predict`."""
        return cast(Tensor, model(x, times, encoder_hidden_states=embeds, return_dict=False)[0])


class StableDiffusionXL(Family):
    """Stable Diffusion XL, whose UNet also gets the size of the image and pooled embeddings of the prompt."""

    upcast_vae = True

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """Call the UNet for an uncropped image of the wanted size, see `Family.predict`."""
        height, width = self.size
        # Original size, crop position and target size: those of an image that was not cropped.
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=embeds.dtype, device=x.device)
        added = {"text_embeds": pooled, "time_ids": sizes.expand(len(x), -1)}
        output: Tensor = model(x, times, encoder_hidden_states=embeds, added_cond_kwargs=added, return_dict=False)[0]
        return output


class StableDiffusion3(Family):
    """Stable Diffusion 3: flow matching with a transformer."""

    part = "transformer"
    flow = True

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        """Encode prompts with all three text encoders, see `Family.encode`."""
        return super().encode(prompts, negatives, prompt_2=None, prompt_3=None, **options)

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """Call the transformer, see `Family.predict`."""
        conditions = {"encoder_hidden_states": embeds, "pooled_projections": pooled}
        return cast(Tensor, model(hidden_states=x, timestep=times, **conditions, return_dict=False)[0])


def _accept(family: Any, pipeline: str | None) -> None:
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise RegistryError(f"register_diffusion_family needs a subclass of Family, got {family!r}.")


FAMILIES: Registry[type[Family]] = Registry("diffusion family", accept=_accept)

Kind = TypeVar("Kind", bound=type[Family])


def register_diffusion_family(pipeline: str) -> Callable[[Kind], Kind]:
    """Register a `Family` for pipelines of the named class and of classes derived from it. A decorator.

    The pipeline is any `DiffusionPipeline` of diffusers that has the denoising model under `Family.part` (its
    `config.sample_size` and `in_channels` give the size of latents), a `scheduler`, and, if it has a `vae`,
    `vae_scale_factor`. If its UNet is called like that of Stable Diffusion, no class is needed:
    `register_diffusion_family("MyPipeline")(StableDiffusion)`.

    Args:
        pipeline: The class name of the pipeline.

    Returns:
        The decorator.

    Raises:
        RegistryError: If the decorated object is not a `Family`, or the name is taken.
    """
    return FAMILIES.register(pipeline)


register_diffusion_family("StableDiffusionPipeline")(StableDiffusion)
register_diffusion_family("StableDiffusionXLPipeline")(StableDiffusionXL)
register_diffusion_family("StableDiffusion3Pipeline")(StableDiffusion3)


def family_of(pipeline: Any) -> type[Family]:
    """Look up the family of a pipeline.

    Args:
        pipeline: The pipeline.

    Returns:
        The family registered for its class, or for the nearest base class.

    Raises:
        ConfigError: If there is none.
    """
    name = next((kind.__name__ for kind in type(pipeline).__mro__ if kind.__name__ in FAMILIES), None)
    if name is None:
        raise ConfigError(
            f"model.model_path: {type(pipeline).__name__} cannot be trained here; it must be one of "
            f"{', '.join(FAMILIES.names())}, or derived from one, or registered with register_diffusion_family."
        )
    return FAMILIES.get(name)


def load_pipeline(config: ModelConfig) -> Any:
    """Load the diffusers pipeline that `model.model_path` names.

    Args:
        config: The section `model`. Its path is a folder, a hub name, a pipeline, or `module:function` that returns
            one.

    Returns:
        The pipeline.

    Raises:
        ConfigError: If it cannot be loaded, has no family, or diffusers is not installed.
    """
    with needed("model.model_arch_type: diffusion needs diffusers", "diffusion"):
        from diffusers import DiffusionPipeline
    path = called_by_name(config.model_path, "model.model_path")
    if isinstance(path, DiffusionPipeline):
        if config.changed("dtype"):
            raise ConfigError(f"model.dtype ({config.dtype!r}): a pipeline in memory is used as it is; convert it.")
        return _checked(path)
    if not isinstance(path, str):
        raise ConfigError(
            f"model.model_path ({type(path).__name__}) must be a diffusers pipeline, its folder or hub name."
        )
    inspect_pipeline(config)
    with loadable(path, "model.model_path", "model.model_extra_configs"), no_bars():
        pipeline = DiffusionPipeline.from_pretrained(
            path, torch_dtype=getattr(torch, config.dtype), **config.model_extra_configs
        )
    return _checked(pipeline, repr(path))


def _checked(pipeline: Any, name: str = "") -> Any:
    """Return a pipeline of a known family whose weights are finite; ConfigError for another one."""
    family_of(pipeline)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            require_finite(part, f"model.model_path ({name or type(pipeline).__name__}, {type(part).__name__})")
    return pipeline


def inspect_pipeline(config: ModelConfig) -> None:
    """Check a pipeline in a folder by its index and the headers of its files, without reading a weight.

    Args:
        config: The section `model`.

    Raises:
        ConfigError: As `load_pipeline`, for what can be known without the weights.
    """
    path = config.model_path
    if not isinstance(path, str) or is_python_name(path):
        return
    check_place(path, "model.model_path")
    if not Path(path).is_dir():
        return
    try:
        index = json.loads((Path(path) / "model_index.json").read_text(encoding="utf-8"))
        parts = [name for name, value in index.items() if isinstance(value, list) and value[-1] is not None]
    except (OSError, ValueError, AttributeError, IndexError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise ConfigError(
            f"model.model_path ({path!r}) is not a folder of diffusers: its model_index.json cannot be read: {why}."
        ) from error
    for name in parts:
        if not (Path(path) / name).is_dir():
            raise ConfigError(f"model.model_path ({path!r}): the folder {name} of its model_index.json is missing.")


@contextmanager
def no_bars() -> Iterator[None]:
    """Hide the progress bars of diffusers and transformers for reading and writing weights, within a block."""
    from diffusers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with no_progress_bars():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
