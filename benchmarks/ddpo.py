"""Measure DDPO: images per CPU second, and the time of each phase.

    python -m benchmarks.ddpo [--lora] [--rounds 6] [--samples 8] [--steps 10] [--json out.json]

The model is a Stable Diffusion with random weights, a UNet of 1.0M parameters on latents of 4 x 8 x 8, and guidance. A
round is 8 images of 10 steps and one update on all of them, like an epoch of TRL's DDPOTrainer. The reward costs almost
nothing. "rest" is the time for making the pipeline and writing the run folder.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import trlx_like
from benchmarks.measure import arguments, measure, show
from trlx_like import TRLConfig
from trlx_like.rewards.images import brightness

PROMPTS = ["cat", "dog", "horse", "monkey", "rabbit", "zebra", "spider", "bird"]


def pipeline(widths: tuple[int, int]) -> Any:
    """Make a small Stable Diffusion 1.5 with random weights. widths: channels of the UNet's two levels."""
    torch.manual_seed(0)
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    tokens = {token: number for number, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    ids: dict[str, Any] = {"bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53, "vocab_size": 54}
    text = CLIPTextConfig(num_attention_heads=2, max_position_embeddings=16, **sizes, **ids)
    unet: dict[str, Any] = {"sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 8}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    betas: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    ends: dict[str, Any] = {"steps_offset": 1, "clip_sample": False, "set_alpha_to_one": False}
    halves: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    make: Any = StableDiffusionPipeline
    return make(
        vae=AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, **halves),
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer(vocab=tokens, merges=[], model_max_length=16),
        unet=UNet2DConditionModel(block_out_channels=widths, attention_head_dim=8, **unet, **blocks),
        scheduler=DDIMScheduler(**betas, **ends),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def config(given: argparse.Namespace, folder: Path) -> TRLConfig:
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"}
    return TRLConfig.from_dict(
        {
            "model": {
                "model_path": pipeline(tuple(given.widths)),
                "model_arch_type": "diffusion",
                "peft_config": lora if given.lora else None,
            },
            "optimizer": {"name": "adamw", "kwargs": {"lr": 3e-4}},
            "method": {
                "name": "DDPOConfig",
                "num_inference_steps": given.steps,
                "num_samples": given.samples,
                "chunk_size": given.samples,
            },
            "train": {
                "trainer": "DDPOTrainer",
                "total_steps": given.rounds,
                "epochs": given.rounds,
                "batch_size": given.samples,
                "eval_interval": given.rounds + 1,
                "checkpoint_interval": given.rounds + 1,
                "save_optimizer": False,
                "checkpoint_dir": str(folder),
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train a LoRA of rank 4 in place of the UNet")
    parser.add_argument("--rounds", type=int, default=6, help="rounds, each with one update")
    parser.add_argument("--samples", type=int, default=8, help="images of a round")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps of an image")
    parser.add_argument("--widths", type=int, nargs=2, default=(32, 64), help="channels of the UNet's two levels")
    given = arguments(parser)

    def run(folder: Path, callbacks: list[Any]) -> Any:
        made = config(given, folder)
        trainer = trlx_like.train(made, brightness, PROMPTS, eval_prompts=PROMPTS[:1], callbacks=callbacks)
        print(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters")
        return trainer

    show(measure(run), given.json)


if __name__ == "__main__":
    main()
