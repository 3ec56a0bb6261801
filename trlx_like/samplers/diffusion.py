"""Sampling of images step by step, with the log-probability of each denoising step as the learner computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trlx_like.data.diffusion import Conditioning
from trlx_like.functional.counter import keys, normals, random_stream
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.pipelines.captions import NEGATIVE, Captions
from trlx_like.samplers.schedules import Schedule, Step


@dataclass
class Trajectories:
    """Hold images with the denoising steps that made them. All tensors are on the CPU."""

    captions: Captions
    prompts: Conditioning
    latents: Tensor  # [B, S + 1, *x] float32, noise first
    logprobs: Tensor  # [B, S] float32
    images: Tensor  # [B, C, H, W] float32 in [0, 1]


class EncodedPrompts:
    """Cache encoded prompts: known prompts are encoded once, others on every use.

    Args:
        model: The diffusion model that encodes.
        negative_prompt: The negative prompt of prompts that have none under the metadata key "negative_prompt". None is
            the pipeline's own.
        guidance: Whether negative prompts are needed, for classifier-free guidance.
    """

    AT_MOST = 4096
    """How many prompts are kept; further ones are encoded whenever they are sampled."""

    def __init__(self, model: DiffusionModel, negative_prompt: str | None, *, guidance: bool) -> None:
        self.model = model
        self.negative_prompt = negative_prompt
        self.guidance = guidance
        self._known: dict[tuple[str, str | None], Conditioning] = {}

    def remember(self, sources: Sequence[Captions]) -> None:
        """Encode prompts now and keep the result, up to `AT_MOST` of them.

        Args:
            sources: Data sets of prompts. Repeated prompts count once.
        """
        keys = list(dict.fromkeys(key for captions in sources for key in self._keys(captions)))[: self.AT_MOST]
        negatives: dict[str | None, Conditioning] = {}
        for key, element in self._encode(keys).items():
            first = negatives.setdefault(key[1], element)  # prompts share the tensors of an equal negative prompt
            negative = {name: getattr(first, name) for name in ("negative_embeds", "negative_pooled")}
            self._known[key] = replace(element, **negative)

    def __call__(self, captions: Captions) -> Conditioning:
        """Return the encoded prompts, one row per prompt, on the CPU."""
        keys = self._keys(captions)
        new = self._encode([key for key in dict.fromkeys(keys) if key not in self._known])
        return Conditioning.collate([new[key] if key in new else self._known[key] for key in keys])

    def _keys(self, captions: Captions) -> list[tuple[str, str | None]]:
        """Return (prompt, negative prompt) of each row."""
        rows = zip(captions.texts, captions.metadata, strict=True)
        return [(text, row.get(NEGATIVE, self.negative_prompt)) for text, row in rows]

    def _encode(self, keys: list[tuple[str, str | None]]) -> dict[tuple[str, str | None], Conditioning]:
        """Encode (prompt, negative prompt) pairs in one call."""
        if not keys:
            return {}
        texts, negatives = zip(*keys, strict=True)
        return dict(zip(keys, self.model.encode(texts, negatives, self.guidance).split(), strict=True))


@dataclass(eq=False)
class DiffusionSampler:
    """Sample images with a diffusion model, and score their denoising steps for training.

    Args:
        model: The diffusion model.
        schedule: The denoising steps.
        encoded: Encodes prompts.
        guidance_scale: The weight of the prompt against the negative prompt; 1 or below is no guidance.
        learn_guided: True scores the steps under the guided model, which samples the images. False scores the same
            steps under the model without guidance.
        through_negative: Whether gradients flow through the model's output for the negative prompt.
        batch_size: How many images are generated at once; None is all.
    """

    model: DiffusionModel
    schedule: Schedule
    encoded: EncodedPrompts
    _: KW_ONLY
    guidance_scale: float
    learn_guided: bool = True
    through_negative: bool = True
    batch_size: int | None = None

    @torch.no_grad()
    def sample(self, captions: Captions, device: torch.device, stream: int | None = None) -> Trajectories:
        """Generate one image per prompt.

        Args:
            captions: The prompts.
            device: The device to generate on.
            stream: Determines the noise of each image, together with the number of its prompt. None draws one with
                torch's global generator.

        Returns:
            The images and their denoising steps, on the CPU.
        """
        size, prompts = self.batch_size or len(captions), self.encoded(captions)
        key = keys(random_stream() if stream is None else stream, captions.numbers, device)
        batches = [slice(start, start + size) for start in range(0, len(prompts), size)]
        parts = [self._sample(prompts[rows], device, key[rows]) for rows in batches]
        latents, logprobs, images = (torch.cat(column) for column in zip(*parts, strict=True))
        return Trajectories(captions, prompts, latents, logprobs, images)

    def _sample(self, prompts: Conditioning, device: torch.device, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Generate one batch: latents [B, S + 1, *x], log-probabilities [B, S], images [B, C, H, W]."""
        prompts, count = prompts.to(device), math.prod(self.model.shape)
        noise = normals(key, (len(self.schedule) + 1) * count).view(len(key), -1, *self.model.shape)  # [B, S + 1, *x]
        x = noise[:, 0]
        latents, logprobs = [x.cpu()], []
        for number in range(len(self.schedule)):
            t = torch.full((len(x),), number)
            guided, plain = self.model(x, self.schedule.times(t).to(device), prompts, self.guidance_scale)
            step = self.schedule.step(guided, t, x, noise=noise[:, number + 1])
            if not self.learn_guided:
                step = self.schedule.step(plain, t, x, step.prev)
            x = step.prev
            latents.append(x.cpu())
            logprobs.append(step.logprob.cpu())
        images = self.model.decode(x).cpu()
        return torch.stack(latents, dim=1), torch.stack(logprobs, dim=1), images

    def score(self, x: Tensor, prev: Tensor, t: Tensor, prompts: Conditioning) -> Step:
        """Score given denoising steps under the present model, with gradient.

        Args:
            x: Latents before the steps. [B, *x]
            prev: Latents after the steps. [B, *x]
            t: The number of each step. [B]
            prompts: The encoded prompts of the rows.

        Returns:
            Log-probability, mean and standard deviation of the steps.
        """
        times = self.schedule.times(t)
        found = self.model(x, times, prompts, self.guidance_scale, through_negative=self.through_negative)
        return self.schedule.step(self._learned(*found), t, x, prev)

    def reference_mean(self, x: Tensor, t: Tensor, prompts: Conditioning) -> Tensor:
        """Compute the means of denoising steps under the reference, without gradient.

        Args:
            x: Latents before the steps. [B, *x]
            t: The number of each step. [B]
            prompts: The encoded prompts of the rows.

        Returns:
            The means. [B, *x] float32
        """
        found = self.model.reference(x, self.schedule.times(t), prompts, self.guidance_scale)
        return self.schedule.mean(self._learned(*found).float(), t, x.float())

    def _learned(self, guided: Tensor, plain: Tensor) -> Tensor:
        """Choose the output whose log-probabilities are learned."""
        return guided if self.learn_guided else plain


def as_pictures(images: Tensor) -> list[Any]:
    """Convert images [B, C, H, W] in [0, 1] to PIL images; one channel becomes greyscale."""
    from PIL import Image

    levels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(level.squeeze(2) if level.shape[2] == 1 else level) for level in levels]
