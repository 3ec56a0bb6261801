"""A diffusion model: a pipeline of diffusers whose denoising model is trained, and whose other parts are not.

VAE and text encoders are frozen. A pipeline without a VAE makes pixels, in [-1, 1]. Left out on purpose: other tasks
than making an image from text, and training text encoders.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trlx_like.data.diffusion import Conditioning
from trlx_like.errors import ConfigError
from trlx_like.functional.diffusion import guided
from trlx_like.models.adapters import OPTION, AdapterWeights, has_adapter, leave_out_frozen, merged, read_adapter
from trlx_like.models.diffusion_families import family_of, no_bars
from trlx_like.models.loading import disable_dropout

logger = logging.getLogger(__name__)

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
"""Layers that get an adapter unless `target_modules` names others: those of attention."""


class DiffusionModel(nn.Module):
    """The denoising model of a pipeline, which is trained, and the rest of it, which is not.

    pipeline: of one of `FAMILIES`; it is used as it is, so training changes it. size: height and width of images in
    pixels; None: what the pipeline makes by default.
    """

    def __init__(self, pipeline: Any, size: tuple[int | None, int | None] = (None, None)) -> None:
        super().__init__()
        kind = family_of(pipeline)
        # In a list, so that its parts are neither trained nor saved with the model's weights.
        self._held = [pipeline]
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
    def pipeline(self) -> Any:
        """The whole pipeline, with the model as it is now."""
        return self._held[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the latents of an image."""
        return (self.denoiser.config.in_channels, *self.latent_size)  # type: ignore[union-attr, return-value]

    def _sizes(self, size: tuple[int | None, int | None]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of the latents, and of the image."""
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
        """Puts a new LoRA into the model; from then on only that is trained, and saved in checkpoints."""
        config = read_adapter({"target_modules": TARGETS, **given} if isinstance(given, dict) else given)
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise ConfigError(f"{OPTION}.peft_type: diffusers can save and load LORA only.")
        if has_adapter(self.denoiser):
            raise ConfigError(f"{OPTION}: the pipeline of model.model_path has an adapter already.")
        config.target_modules = config.target_modules or TARGETS
        try:
            self.denoiser.add_adapter(config)  # type: ignore[operator]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{OPTION} does not fit {type(self.denoiser).__name__}: {error}") from error
        leave_out_frozen(self, self.denoiser)
        weights = [(parameter.numel(), parameter.requires_grad) for parameter in self.denoiser.parameters()]
        logger.info(
            "Training an adapter: %d of %d weights.", sum(n for n, t in weights if t), sum(n for n, _ in weights)
        )

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Moves all parts to a device, and those that are not trained to a number format (None: as they are)."""
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
        """Remembers the present weights, to be held close to."""
        self._reference = [AdapterWeights(self.denoiser).to(next(self.denoiser.parameters()).device)]

    def reference_modules(self) -> list[nn.Module]:
        return list(self._reference)

    def slice_vae(self, wanted: bool) -> None:
        """Whether images are decoded one at a time, where the VAE can."""
        vae = getattr(self.pipeline, "vae", None)
        if vae is not None and hasattr(vae, "enable_slicing"):
            vae.enable_slicing() if wanted else vae.disable_slicing()

    # Prompts and images.

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str | None], guidance: bool) -> Conditioning:
        """What the model is told of prompts, on the CPU.

        negatives: of each prompt; None: the pipeline's own, which for some is not that of "". guidance: whether they
        are needed.
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
        """Images [B, C, H, W] float32 in [0, 1] of latents [B, *x]."""
        vae = getattr(self.pipeline, "vae", None)
        if vae is None:
            return (latents.float() / 2 + 0.5).clamp(0, 1)
        weight = next(vae.parameters(), latents)
        images: Tensor = vae.decode(_unscaled(latents, vae.config).to(weight.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    # The model.

    def forward(
        self, x: Tensor, times: Tensor, prompts: Conditioning, guidance_scale: float, *, through_negative: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The guided output and that for the prompt alone, both [B, *x]. x: [B, *x], times: [B].

        guidance_scale: at 1 or below there is none, and both are the same. through_negative: whether a gradient goes
        through the part of the output that is for the negative prompt.
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
        """As `forward`, with the weights that were remembered, without gradient."""
        with torch.no_grad(), self._reference[0].in_place():
            found: tuple[Tensor, Tensor] = self(x, times, prompts, guidance_scale)
            return found

    def _predict(self, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
        # The first weight is no adapter's, so it has the number format that the model computes in.
        dtype = next(self.denoiser.parameters()).dtype
        pooled = None if pooled is None else pooled.to(dtype)
        return self.family.predict(self.denoiser, x.to(dtype), times, embeds.to(dtype), pooled)

    def save(self, directory: Path, whole: bool = False) -> None:
        """What plain diffusers load: the pipeline, or of one with an adapter the file for `load_lora_weights`.

        whole: the pipeline also with an adapter, which is added into a copy of the model's weights.
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
        from peft.utils import get_peft_model_state_dict

        layers = {key: value.contiguous() for key, value in get_peft_model_state_dict(self.denoiser).items()}
        settings = self.denoiser.peft_config["default"].to_dict()  # type: ignore[index, union-attr]
        parts = {f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": settings}
        self.pipeline.save_lora_weights(directory, **parts)


def _unscaled(latents: Tensor, settings: Any) -> Tensor:
    """Latents as a VAE wants them, whose settings say how the denoising model's are scaled and shifted."""
    latents = latents.float() / getattr(settings, "scaling_factor", 1.0)
    mean, std = (getattr(settings, name, None) for name in ("latents_mean", "latents_std"))
    if mean is not None and std is not None:
        mean, std = (torch.tensor(value, device=latents.device).reshape(1, -1, 1, 1) for value in (mean, std))
        latents = latents * std + mean
    return latents + (getattr(settings, "shift_factor", None) or 0.0)
