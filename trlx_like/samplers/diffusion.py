"""Images drawn step by step, with the log-probability of each step as the learner will take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trlx_like.data.diffusion import Conditioning
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.pipelines.captions import NEGATIVE, Captions
from trlx_like.samplers.schedules import Schedule, Step


@dataclass
class Trajectories:
    """Images and how they came about. All on the CPU."""

    captions: Captions
    prompts: Conditioning
    latents: Tensor  # [B, S + 1, *x] float32, noise first
    logprobs: Tensor  # [B, S] float32
    images: Tensor  # [B, C, H, W] float32 in [0, 1]


class EncodedPrompts:
    """What the model is told of prompts, encoded once where they are known beforehand.

    negative_prompt: of prompts that have none of their own under the key "negative_prompt". guidance: whether negative
    prompts are needed.
    """

    AT_MOST = 4096
    """Prompts that are remembered; others are encoded whenever they are drawn."""

    def __init__(self, model: DiffusionModel, negative_prompt: str | None, *, guidance: bool) -> None:
        self.model = model
        self.negative_prompt = negative_prompt
        self.guidance = guidance
        self._known: dict[tuple[str, str | None], Conditioning] = {}

    def remember(self, sources: Sequence[Captions]) -> None:
        """Encodes prompts now."""
        keys = list(dict.fromkeys(key for captions in sources for key in self._keys(captions)))[: self.AT_MOST]
        negatives: dict[str | None, Conditioning] = {}
        for key, element in self._encode(keys).items():
            first = negatives.setdefault(key[1], element)  # one negative prompt is kept once
            negative = {name: getattr(first, name) for name in ("negative_embeds", "negative_pooled")}
            self._known[key] = replace(element, **negative)

    def __call__(self, captions: Captions) -> Conditioning:
        """A row for each prompt, on the CPU."""
        keys = self._keys(captions)
        new = self._encode([key for key in dict.fromkeys(keys) if key not in self._known])
        return Conditioning.collate([new[key] if key in new else self._known[key] for key in keys])

    def _keys(self, captions: Captions) -> list[tuple[str, str | None]]:
        rows = zip(captions.texts, captions.metadata, strict=True)
        return [(text, row.get(NEGATIVE, self.negative_prompt)) for text, row in rows]

    def _encode(self, keys: list[tuple[str, str | None]]) -> dict[tuple[str, str | None], Conditioning]:
        if not keys:
            return {}
        texts, negatives = zip(*keys, strict=True)
        return dict(zip(keys, self.model.encode(texts, negatives, self.guidance).split(), strict=True))


class DiffusionSampler:
    """Draws images with a model, and scores steps of theirs.

    encoded: what the model is told of prompts. guidance_scale: weight of the prompt against the negative prompt; 1 or
    below: no guidance. learn_guided: whether it is the guided model whose log-probabilities are taken, or that of the
    prompt alone, of the same guided images. through_negative: whether learning changes what the model says to the
    negative prompt. batch_size: images drawn at once; None: all.
    """

    def __init__(
        self,
        model: DiffusionModel,
        schedule: Schedule,
        encoded: EncodedPrompts,
        *,
        guidance_scale: float,
        learn_guided: bool = True,
        through_negative: bool = True,
        batch_size: int | None = None,
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.encoded = encoded
        self.guidance_scale = guidance_scale
        self.learn_guided = learn_guided
        self.through_negative = through_negative
        self.batch_size = batch_size

    @torch.no_grad()
    def sample(self, captions: Captions, device: torch.device) -> Trajectories:
        """An image to each prompt, from torch's random numbers on the device."""
        size, prompts = self.batch_size or len(captions), self.encoded(captions)
        parts = [self._sample(prompts[start : start + size], device) for start in range(0, len(prompts), size)]
        latents, logprobs, images = (torch.cat(column) for column in zip(*parts, strict=True))
        return Trajectories(captions, prompts, latents, logprobs, images)

    def _sample(self, prompts: Conditioning, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, log-probabilities and images."""
        prompts = prompts.to(device)
        x = torch.randn(len(prompts), *self.model.shape, device=device)
        latents, logprobs = [x.cpu()], []
        for number in range(len(self.schedule)):
            t = torch.full((len(x),), number)
            guided, plain = self.model(x, self.schedule.times(t).to(device), prompts, self.guidance_scale)
            step = self.schedule.step(guided, t, x)
            if not self.learn_guided:
                step = self.schedule.step(plain, t, x, step.prev)
            x = step.prev
            latents.append(x.cpu())
            logprobs.append(step.logprob.cpu())
        images = self.model.decode(x).cpu()
        return torch.stack(latents, dim=1), torch.stack(logprobs, dim=1), images

    def score(self, x: Tensor, prev: Tensor, t: Tensor, prompts: Conditioning) -> Step:
        """How likely the steps from x to prev [B, *x] are, with gradient. t: their numbers [B]."""
        times = self.schedule.times(t)
        found = self.model(x, times, prompts, self.guidance_scale, through_negative=self.through_negative)
        return self.schedule.step(self._learned(*found), t, x, prev)

    def reference_mean(self, x: Tensor, t: Tensor, prompts: Conditioning) -> Tensor:
        """Where the reference leads on average from x [B, *x], without gradient."""
        found = self.model.reference(x, self.schedule.times(t), prompts, self.guidance_scale)
        return self.schedule.mean(self._learned(*found).float(), t, x.float())

    def _learned(self, guided: Tensor, plain: Tensor) -> Tensor:
        return guided if self.learn_guided else plain


def as_pictures(images: Tensor) -> list[Any]:
    """PIL images of [B, C, H, W] in [0, 1]; one channel is grey."""
    from PIL import Image

    levels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(level.squeeze(2) if level.shape[2] == 1 else level) for level in levels]
