"""Tiny random pipelines of diffusers, of a few ten thousand weights each, as its own classes make them."""

from __future__ import annotations

import atexit
import functools
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

from tests.tiny import tiny_tokenizer
from trlx_like.models.diffusion_families import no_bars

LENGTH = 10
"""Tokens of a prompt."""


def clip_tokenizer() -> CLIPTokenizer:
    """A token a letter."""
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    vocabulary = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=LENGTH)


def clip_config(width: int = 8) -> CLIPTextConfig:
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = {"vocab_size": 54, "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    return CLIPTextConfig(**sizes, **ids, max_position_embeddings=LENGTH, projection_dim=width)


def vae(**settings: Any) -> Any:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    return AutoencoderKL(**blocks, block_out_channels=[4, 4], norm_num_groups=2, latent_channels=4, **settings)


def unet(channels: int = 4, **settings: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=4,
        in_channels=channels,
        out_channels=channels,
        layers_per_block=1,
        norm_num_groups=4,
        **{
            "down_block_types": ("CrossAttnDownBlock2D",),
            "mid_block_type": None,
            "up_block_types": ("CrossAttnUpBlock2D",),
            "block_out_channels": (8,),
            "attention_head_dim": 4,
            "cross_attention_dim": 8,
            **settings,
        },
    )


def sd(**settings: Any) -> Any:
    """Stable Diffusion 1.x. Images of 8 x 8 pixels, latents of 4 x 4 x 4; the last step is not drawn.

    settings: of the scheduler.
    """
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    torch.manual_seed(0)
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    ends = {"steps_offset": 1, "clip_sample": False}
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(),
        unet=unet(),
        scheduler=DDIMScheduler(**{**betas, **ends, **settings}),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    torch.manual_seed(0)
    added: dict[str, Any] = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    return StableDiffusionXLPipeline(
        vae=vae(force_upcast=True),
        text_encoder=CLIPTextModel(clip_config()),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet(cross_attention_dim=16, projection_class_embeddings_input_dim=6 * 4 + 8, **added),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"),
    )


def sd3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    t5 = T5Config(vocab_size=32, d_model=32, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=1, eos_token_id=0)
    transformer = SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Pipeline(
        vae=vae(shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(clip_config()),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        text_encoder_3=T5EncoderModel(t5),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=tiny_tokenizer(ends=True),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


@functools.cache
def saved(kind: str) -> str:
    """A folder with the pipeline of that name ("sd", "sdxl", "sd3"), as a user's `model.model_path`."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny_{kind}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with no_bars():
        {"sd": sd, "sdxl": sdxl, "sd3": sd3}[kind]().save_pretrained(folder)
    return str(folder)
