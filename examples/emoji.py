"""A small text-to-image model of captioned emoji, as a pipeline of its own that DDPO can tune.

It denoises pictures of 32 x 32 pixels whose 2 x 2 blocks are stacked as channels; captions have up to eight words. A
model is a folder with `unet/` and `scheduler/` of diffusers, `text.json` with the words, and `text.safetensors` with
the weights of `WordEncoder`. `load` reads such a folder; the pipeline's `save_pretrained`, and thus DDPO's export,
writes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from trlx_like import register_diffusion_family
from trlx_like.errors import DataError
from trlx_like.models.diffusion_families import StableDiffusion

WORDS = 8
"""Number of words of a caption that the model reads."""
PREFIX = "state."
"""Prefix of the names in `text.safetensors`."""


class WordEncoder(nn.Module):
    """Encode captions with embeddings of words and positions. words: the vocabulary, of which the first means none."""

    def __init__(self, words: Sequence[str], width: int = 64) -> None:
        super().__init__()
        self.words = list(words)
        self.number = {word: number for number, word in enumerate(words)}
        # The attributes have the short names of the file.
        self.e = nn.Embedding(len(words), width)
        self.p = nn.Parameter(torch.zeros(WORDS, width))
        self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def numbers(self, captions: Sequence[str]) -> Tensor:
        """Convert captions to word numbers [B, 8] int64. Unknown words become "none"; only eight words are read."""
        rows = [[self.number.get(word, 0) for word in caption.split()[:WORDS]] for caption in captions]
        return torch.tensor([row + [0] * (WORDS - len(row)) for row in rows], device=self.p.device)

    def forward(self, ids: Tensor) -> Tensor:
        """Encode word numbers: [B, 8] -> [B, 8, width]."""
        hidden = self.e(ids) * (ids > 0)[..., None] + self.p
        hidden = hidden + hidden.mean(dim=1, keepdim=True)
        found: Tensor = hidden + self.f(hidden)
        return found


class Blocks(nn.Module):
    """Replace a VAE, without weights: rearrange pictures [B, 3, 2h, 2w] to [B, 12, h, w] and back."""

    config = SimpleNamespace(scaling_factor=1.0)

    def encode(self, pictures: Tensor) -> Tensor:
        return functional.pixel_unshuffle(pictures, 2)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return (functional.pixel_shuffle(latents, 2),)


class EmojiPipeline(DiffusionPipeline):
    """Provide what DDPO needs from a pipeline: the parts, the encoding of captions, and saving."""

    vae_scale_factor = 2
    vae: Blocks
    text_encoder: WordEncoder
    unet: Any
    scheduler: Any

    def __init__(self, vae: Blocks, text_encoder: WordEncoder, unet: Any, scheduler: Any) -> None:
        super().__init__()
        register: Any = self.register_modules  # its modules are not typed
        register(vae=vae, text_encoder=text_encoder, unet=unet, scheduler=scheduler)

    def encode_prompt(self, prompt: list[str], negative_prompt: list[str] | None, **_: Any) -> tuple[Tensor, Tensor]:
        """Return the embeddings of captions, and of negative captions for guidance (no words unless they are given)."""
        negatives = [""] * len(prompt) if negative_prompt is None else negative_prompt
        encoder = self.text_encoder
        return encoder(encoder.numbers(prompt)), encoder(encoder.numbers(negatives))

    def save_pretrained(self, save_directory: str | PathLike[str], *_: Any, **__: Any) -> None:
        """Write a folder that `load` reads."""
        folder, encoder = Path(save_directory), self.text_encoder
        folder.mkdir(parents=True, exist_ok=True)
        self.unet.save_pretrained(folder / "unet")
        self.scheduler.save_pretrained(folder / "scheduler")
        (folder / "text.json").write_text(json.dumps({"words": encoder.words}))
        weights = {PREFIX + name: value.contiguous() for name, value in encoder.state_dict().items()}
        save_file(weights, folder / "text.safetensors")


# Its UNet is called like that of Stable Diffusion.
register_diffusion_family(EmojiPipeline.__name__)(StableDiffusion)


def load(folder: Path) -> EmojiPipeline:
    """Load the pipeline of a model's folder. Raise DataError for any other folder."""
    try:
        words = json.loads((folder / "text.json").read_text())["words"]
        weights = load_file(folder / "text.safetensors")
        unet = UNet2DConditionModel.from_pretrained(folder / "unet")
        # With few steps, the saved spacing leaves some noise after the last step; this spacing leaves none.
        scheduler = DDIMScheduler.from_pretrained(folder / "scheduler", timestep_spacing="trailing")
    except OSError as error:
        raise DataError(
            f"--model {folder} is not the folder of an emoji model ({error}): it needs unet/, scheduler/, text.json "
            "and text.safetensors, as --train-base makes them."
        ) from error
    text_encoder = WordEncoder(words, weights[f"{PREFIX}p"].shape[1])
    text_encoder.load_state_dict({name.removeprefix(PREFIX): value for name, value in weights.items()})
    return EmojiPipeline(Blocks(), text_encoder, unet, scheduler)


def new_pipeline(words: Sequence[str], widths: Sequence[int] = (48, 64, 96), text_width: int = 64) -> EmojiPipeline:
    """Make a pipeline with random weights, by default 2.95M of them in the UNet.

    words: the vocabulary; the first means none. widths: channels of the UNet at 16, 8 and 4 pixels per side.
    """
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=12,
        out_channels=12,
        layers_per_block=1,
        block_out_channels=tuple(widths),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text_width,
        attention_head_dim=32,
        norm_num_groups=16,
    )
    scheduler = DDIMScheduler(
        beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", timestep_spacing="trailing"
    )
    return EmojiPipeline(Blocks(), WordEncoder(words, text_width), unet, scheduler)
