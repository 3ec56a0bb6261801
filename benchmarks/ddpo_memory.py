"""Estimate the memory of DDPO on Stable Diffusion 1.5, without its weights and without a GPU.

    python -m benchmarks.ddpo_memory [configs/ddpo_sd15_lora.yml] [--set OPTION=VALUE ...]

It is `trlx-like estimate` for a pipeline with the parts and settings of Stable Diffusion 1.5, which are written here:
nothing has to be downloaded. A real GPU also needs memory for its context (some hundred megabytes), for workspaces
of kernels and for gaps between tensors: keep a tenth of its memory free.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

import torch
import yaml

from trlx_like import TRLConfig
from trlx_like.estimate import Estimate, estimate

LENGTH = 77
"""Tokens of a prompt."""


def stable_diffusion() -> Any:
    """Make the parts of Stable Diffusion 1.5 with random weights. Its tokenizer knows letters."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
    }
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    vocabulary = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    make: Any = StableDiffusionPipeline
    return make(
        vae=AutoencoderKL(latent_channels=4, layers_per_block=2, sample_size=512, **blocks),
        text_encoder=CLIPTextModel(CLIPTextConfig(num_attention_heads=12, projection_dim=768, **sizes)),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=LENGTH),
        unet=UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def of_stable_diffusion(config: TRLConfig) -> Estimate:
    """Estimate the memory of a run with Stable Diffusion 1.5 as the model."""
    with torch.device("meta"):
        config.model.model_path = stable_diffusion()
    return estimate(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/ddpo_sd15_lora.yml"))
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="change an option")
    given = parser.parse_args()
    changes = {name: yaml.safe_load(value) for name, _, value in (option.partition("=") for option in given.set)}
    config = TRLConfig.load_yaml(given.config)
    found = of_stable_diffusion(TRLConfig.update(config.to_dict(), changes))
    print(*found.lines(), f"at most {found.peak / 1e9:.1f} GB", sep="\n")


if __name__ == "__main__":
    main()
