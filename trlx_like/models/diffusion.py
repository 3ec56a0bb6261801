"""Diffusion models: a pipeline of diffusers whose denoising model is trained.

VAE and text encoders are frozen. A pipeline without a VAE works on pixels in [-1, 1]. Left out on purpose: tasks other
than text to image, and training of text encoders.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trlx_like.data.diffusion import Conditioning
from trlx_like.errors import ConfigError, raised_as
from trlx_like.functional.diffusion import guided
from trlx_like.models.adapters import OPTION, AdapterWeights, leave_out_frozen, log_trained, read_adapter, sort_names
from trlx_like.models.diffusion_families import family_of, no_bars
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.merging import has_adapter, merged

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
"""The layers that get an adapter by default: those of attention."""


class DiffusionModel(nn.Module):
    """The trainable denoising model of a pipeline, with the frozen parts that it works with.

    Args:
        pipeline: A pipeline of one of the `FAMILIES`. It is used as it is, so training changes it.
        size: Height and width of images in pixels; None is the pipeline's default.

    Raises:
        ConfigError: For an unknown pipeline, or a size that the VAE cannot encode.
    """

    def __init__(self, pipeline: Any, size: tuple[int | None, int | None] = (None, None)) -> None:
        super().__init__()
        kind = family_of(pipeline)
        self.pipeline = pipeline  # which holds the model as it is now
        self.scale = pipeline.vae_scale_factor if getattr(pipeline, "vae", None) is not None else 1
        self.denoiser: nn.Module = getattr(pipeline, kind.part)
        self.latent_size, self.size = self._sizes(size)
        self.family = kind(pipeline, self.size)
        self.frozen: list[nn.Module] = [
            part for part in pipeline.components.values() if isinstance(part, nn.Module) and part is not self.denoiser
        ]
        for part in self.frozen:
            part.eval().requires_grad_(False)
        disable_dropout(self.denoiser)
        self._reference: list[AdapterWeights] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the latents of one image, *x."""
        return (self.denoiser.config.in_channels, *self.latent_size)  # type: ignore[union-attr, return-value]

    def _sizes(self, size: tuple[int | None, int | None]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Compute (height, width) of the latents and of the image."""
        default = self.denoiser.config.sample_size  # type: ignore[union-attr]
        defaults = (default, default) if isinstance(default, int) else default
        found = []
        for name, given, own in zip(("height", "width"), size, defaults, strict=True):  # type: ignore[arg-type]
            if given is not None and given % self.scale:
                raise ConfigError(f"method.{name} ({given}) must be a multiple of {self.scale}, for the VAE.")
            found.append(own if given is None else given // self.scale)
        height, width = found
        return (height, width), (height * self.scale, width * self.scale)

    def add_adapter(self, given: Any) -> None:
        """Add a new LoRA adapter, so that only it is trained and saved in checkpoints.

        Args:
            given: `model.peft_config`, a `PeftConfig` or a mapping; `target_modules` defaults to `TARGETS`.

        Raises:
            ConfigError: For other kinds of adapters, and if there is an adapter already.
        """
        config = read_adapter({"target_modules": TARGETS, **given} if isinstance(given, dict) else given)
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise ConfigError(f"{OPTION}.peft_type: diffusers can save and load LORA only.")
        if has_adapter(self.denoiser):
            raise ConfigError(f"{OPTION}: the pipeline of model.model_path has an adapter already.")
        config.target_modules = config.target_modules or TARGETS
        with raised_as(ConfigError, (TypeError, ValueError), f"{OPTION} does not fit {type(self.denoiser).__name__}"):
            self.denoiser.add_adapter(config)  # type: ignore[operator]
        sort_names(config)
        leave_out_frozen(self, self.denoiser)
        log_trained(self.denoiser)

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move all parts to a device, and the frozen ones to a number format.

        Trained weights become float32. A VAE that would overflow in float16 keeps its format.

        Args:
            device: The device.
            dtype: The format of frozen weights; None keeps it.
        """
        vae = getattr(self.pipeline, "vae", None)
        overflows = self.family.upcast_vae and dtype == torch.float16 and vae is not None and vae.config.force_upcast
        for part in self.frozen:
            stays = dtype is None or (part is vae and overflows)
            part.to(device) if stays else part.to(device, dtype)
        self.denoiser.to(device)
        for parameter in self.denoiser.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
            elif dtype is not None:
                parameter.data = parameter.data.to(dtype)

    def add_reference(self) -> None:
        """Copy the present trainable weights as the reference."""
        self._reference = [AdapterWeights(self.denoiser).to(next(self.denoiser.parameters()).device)]

    def reference_modules(self) -> list[nn.Module]:
        """Return the modules that hold the reference's weights; empty without a reference."""
        return list(self._reference)

    def slice_vae(self, wanted: bool) -> None:
        """Switch decoding one image at a time on or off, which saves memory, if the VAE supports it."""
        vae = getattr(self.pipeline, "vae", None)
        if vae is not None and hasattr(vae, "enable_slicing"):
            vae.enable_slicing() if wanted else vae.disable_slicing()

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str | None], guidance: bool) -> Conditioning:
        """Encode prompts with the pipeline's text encoders.

        Args:
            prompts: The prompts.
            negatives: The negative prompt of each; None is the pipeline's own, which in some differs from "".
            guidance: Whether negative prompts are encoded too, for classifier-free guidance.

        Returns:
            The encoded prompts, on the CPU, one row per prompt.
        """
        rows: dict[int, Conditioning] = {}
        for own in (True, False):
            chosen = [row for row, negative in enumerate(negatives) if (negative is None) == own]
            for start in range(0, len(chosen), 32):
                some = chosen[start : start + 32]
                wanted = None if own else [str(negatives[row]) for row in some]
                options = {"device": next(self.denoiser.parameters()).device, "do_classifier_free_guidance": guidance}
                found = self.family.encode([prompts[row] for row in some], wanted, **options)
                embeds, negative, pooled, negative_pooled = (None if v is None else v.cpu() for v in found)
                if not guidance:
                    negative = negative_pooled = None
                assert embeds is not None
                batch = Conditioning(embeds, pooled, negative, negative_pooled)
                rows.update(zip(some, batch.split(), strict=True))
        return Conditioning.collate([rows[row] for row in range(len(rows))])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, *x] to images [B, C, H, W], float32 in [0, 1]."""
        vae = getattr(self.pipeline, "vae", None)
        if vae is None:
            return (latents.float() / 2 + 0.5).clamp(0, 1)
        weight = next(vae.parameters(), latents)
        images: Tensor = vae.decode(_unscaled(latents, vae.config).to(weight.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def forward(
        self, x: Tensor, times: Tensor, prompts: Conditioning, guidance_scale: float, *, through_negative: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Predict with and without classifier-free guidance.

        Args:
            x: Noisy latents. [B, *x]
            times: Their timesteps. [B]
            prompts: The encoded prompts, B rows.
            guidance_scale: The weight of the prompt against the negative prompt; at 1 or below there is no guidance,
                and the two outputs are the same.
            through_negative: Whether gradients flow through the output for the negative prompt.

        Returns:
            The guided output, and the output for the prompt alone. Each [B, *x]
        """
        if guidance_scale <= 1:
            output = self._predict(x, times, prompts.embeds, prompts.pooled)
            return output, output
        embeds, pooled = prompts.doubled()
        both = self._predict(torch.cat([x, x]), torch.cat([times, times]), embeds, pooled)
        negative, positive = both.chunk(2)
        if not through_negative:
            negative = negative.detach()
        return guided(negative, positive, guidance_scale), positive

    def reference(
        self, x: Tensor, times: Tensor, prompts: Conditioning, guidance_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Predict like `forward` with the reference's weights, without gradient.

        Args:
            x: Noisy latents. [B, *x]
            times: Their timesteps. [B]
            prompts: The encoded prompts, B rows.
            guidance_scale: As in `forward`.

        Returns:
            The guided output, and the output for the prompt alone. Each [B, *x]
        """
        with torch.no_grad(), self._reference[0].in_place():
            return cast("tuple[Tensor, Tensor]", self(x, times, prompts, guidance_scale))

    def _predict(self, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        """Call the denoising model in its own number format."""
        # The first weight belongs to no adapter, so it has the format that the model computes in.
        dtype = next(self.denoiser.parameters()).dtype
        pooled = None if pooled is None else pooled.to(dtype)
        return self.family.predict(self.denoiser, x.to(dtype), times, embeds.to(dtype), pooled)

    def save(self, directory: Path, whole: bool = False) -> None:
        """Save what plain diffusers can load: the pipeline, or with an adapter a file for `load_lora_weights`.

        Args:
            directory: The folder.
            whole: With an adapter, save the whole pipeline with the adapter merged instead.
        """
        name, adapter = self.family.part, has_adapter(self.denoiser)
        with no_bars():
            if not adapter:
                self.pipeline.save_pretrained(directory)
            elif whole:
                pipeline = copy.copy(self.pipeline)
                pipeline.register_modules(**{name: merged(self.denoiser)})
                pipeline.save_pretrained(directory)
            else:
                self._save_adapter(directory, name)

    def _save_adapter(self, directory: Path, name: str) -> None:
        """Save the LoRA weights in the format of diffusers."""
        from peft.utils import get_peft_model_state_dict

        layers = {key: value.contiguous() for key, value in get_peft_model_state_dict(self.denoiser).items()}
        settings = self.denoiser.peft_config["default"].to_dict()  # type: ignore[index, union-attr]
        parts = {f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": settings}
        self.pipeline.save_lora_weights(directory, **parts)
        for file in directory.glob("*.safetensors"):
            sort_metadata(file)


def sort_metadata(file: Path) -> None:
    """Sort the entries of `__metadata__` in the header of a safetensors file, which are written in a random order."""
    with file.open("r+b") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            content.seek(8)
            content.write(text.ljust(size))


def _unscaled(latents: Tensor, settings: Any) -> Tensor:
    """Scale and shift latents of the denoising model to those of the VAE, by the VAE's configuration."""
    latents = latents.float() / getattr(settings, "scaling_factor", 1.0)
    mean, std = (getattr(settings, name, None) for name in ("latents_mean", "latents_std"))
    if mean is not None and std is not None:
        mean, std = (torch.tensor(value, device=latents.device).reshape(1, -1, 1, 1) for value in (mean, std))
        latents = latents * std + mean
    return latents + (getattr(settings, "shift_factor", None) or 0.0)
