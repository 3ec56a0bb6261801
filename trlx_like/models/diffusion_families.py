"""Kinds of pipelines that make an image from text, and how each encodes prompts and calls its model.

`FAMILIES` has them by the class of the pipeline. A pipeline of your own is derived from one of these, or says with
`register_diffusion_family` how it is worked with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.imports import import_name, install_hint, is_python_name
from trlx_like.models.loading import no_progress_bars
from trlx_like.registry import Registry


class Family(ABC):
    """What differs between kinds of pipelines."""

    part: str = "unet"
    """Name of the model in the pipeline."""
    flow: bool = False
    """Whether it is a model of flow matching."""
    upcast_vae: bool = False
    """Whether a VAE that asks for it (`force_upcast`, which is also the default) overflows in fp16."""

    def __init__(self, pipeline: Any, size: tuple[int, int]) -> None:
        self.pipeline = pipeline
        self.size = size  # height and width of images

    @abstractmethod
    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        """Embeddings, negative ones, and both pooled: what diffusers' `encode_prompt` returns.

        options: its `device` and `do_classifier_free_guidance`.
        """

    @abstractmethod
    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """The model's output [B, *x]. times: [B]."""

    def _encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        texts = {"prompt": prompts, "negative_prompt": negatives}
        found: tuple[Tensor | None, ...] = self.pipeline.encode_prompt(**texts, num_images_per_prompt=1, **options)
        return found


class StableDiffusion(Family):
    """Stable Diffusion 1.x and 2.x."""

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        return *self._encode(prompts, negatives, **options), None, None

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        output: Tensor = model(x, times, encoder_hidden_states=embeds, return_dict=False)[0]
        return output


class StableDiffusionXL(Family):
    """SDXL, which is told the size of the image and a summary of the prompt."""

    upcast_vae = True

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        return self._encode(prompts, negatives, **options)

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        height, width = self.size
        # Original size, place of its upper left corner, size that is wanted: an image that was not cropped.
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=embeds.dtype, device=x.device)
        added = {"text_embeds": pooled, "time_ids": sizes.expand(len(x), -1)}
        output: Tensor = model(x, times, encoder_hidden_states=embeds, added_cond_kwargs=added, return_dict=False)[0]
        return output


class StableDiffusion3(Family):
    """Stable Diffusion 3: flow matching with a transformer."""

    part = "transformer"
    flow = True

    def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> tuple[Tensor | None, ...]:
        return self._encode(prompts, negatives, prompt_2=None, prompt_3=None, **options)

    def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        conditions = {"encoder_hidden_states": embeds, "pooled_projections": pooled}
        output: Tensor = model(hidden_states=x, timestep=times, **conditions, return_dict=False)[0]
        return output


FAMILIES: Registry[type[Family]] = Registry("diffusion family")

Kind = TypeVar("Kind", bound=type[Family])


def register_diffusion_family(pipeline: str) -> Callable[[Kind], Kind]:
    """Decorator: a `Family` is how pipelines of the class named `pipeline`, and of those derived from it, are trained.

    A pipeline is any `DiffusionPipeline` of diffusers with the model in `Family.part` (its `config.sample_size` and
    `in_channels` are the size of latents), a `scheduler`, and, if it has a `vae`, `vae_scale_factor`. `StableDiffusion`
    fits those whose UNet is called as its is: `register_diffusion_family("MyPipeline")(StableDiffusion)`.

    Raises RegistryError for what is no `Family`, and for a name that is taken.
    """

    def add(family: Kind) -> Kind:
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise RegistryError(f"register_diffusion_family needs a subclass of Family, got {family!r}.")
        return FAMILIES.register(pipeline)(family)

    return add


register_diffusion_family("StableDiffusionPipeline")(StableDiffusion)
register_diffusion_family("StableDiffusionXLPipeline")(StableDiffusionXL)
register_diffusion_family("StableDiffusion3Pipeline")(StableDiffusion3)


def family_of(pipeline: Any) -> type[Family]:
    """How to work with a pipeline. ConfigError for other kinds."""
    name = next((kind.__name__ for kind in type(pipeline).__mro__ if kind.__name__ in FAMILIES), None)
    if name is None:
        raise ConfigError(
            f"model.model_path: {type(pipeline).__name__} cannot be trained here; it must be one of "
            f"{', '.join(FAMILIES.names())}, or derived from one, or registered with register_diffusion_family."
        )
    return FAMILIES.get(name)


def load_pipeline(config: ModelConfig) -> Any:
    """The diffusers pipeline of `model.model_path`: a folder, a hub name, a pipeline, or `module:function` that
    returns one.

    Raises ConfigError for what is none, and without the packages.
    """
    try:
        from diffusers import DiffusionPipeline
    except ImportError as error:
        raise ConfigError(
            f"model.model_arch_type: diffusion needs diffusers ({error}): {install_hint('diffusion')}."
        ) from error
    path = config.model_path
    if is_python_name(path):
        path = import_name(path, "model.model_path")()
    if isinstance(path, DiffusionPipeline):
        family_of(path)
        return path
    if not isinstance(path, str):
        raise ConfigError(
            f"model.model_path ({type(path).__name__}) must be a diffusers pipeline, its folder or hub name."
        )
    try:
        with no_bars():
            pipeline = DiffusionPipeline.from_pretrained(path, **config.model_extra_configs)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.model_path ({path!r}) cannot be loaded: {error}") from error
    family_of(pipeline)
    return pipeline


@contextmanager
def no_bars() -> Iterator[None]:
    """Without the bars of diffusers and transformers for reading and writing weights."""
    from diffusers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with no_progress_bars():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
