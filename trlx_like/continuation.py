"""Continuation of prompts with a trained model, for `trlx-like generate`.

This module loads torch and transformers; the command line imports it when the command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from trlx_like.config import ModelConfig, TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.models import arch_type, load_model, load_tokenizer
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.guided import GuidedEngine, load_ilql_heads
from trlx_like.samplers.text import TextSampler
from trlx_like.sharing.export import checkpoint_in


def weights_of(name: str) -> str:
    """Find the model to load for a run folder, a checkpoint or a model; return its folder or hub name."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or (len(folder.parts) > 1 and folder.parent.is_dir()):  # the hub would be asked
            raise ConfigError(f"{name}: there is no such folder.")
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    chosen = checkpoint_in(folder)
    if chosen is None:
        raise ConfigError(f"{name} is not a model, a checkpoint, or a run with a checkpoint.")
    return str(chosen / "hf_model")


def continued(model: str, prompts: list[str], options: dict[str, Any], seed: int | None) -> list[str]:
    """Return each prompt with its continuation; an encoder-decoder's output is on a line of its own.

    Args:
        model: A run folder, a checkpoint, or the folder or hub name of a model.
        prompts: The prompts. If one is too long for the model, its beginning is cut off.
        options: Generation options; `beta` is for ILQL models only.
        seed: Seed of the sampling; None for a random one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = arch_type(model)
    lm = load_model(model, ModelConfig(model_path=model, model_arch_type=kind))
    tokenizer = load_tokenizer(TokenizerConfig(truncation_side="left"), model)
    torch.nn.Module.to(lm, device)  # transformers' own is not typed
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - options["max_new_tokens"]
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens ({options['max_new_tokens']}) must be below the model's {positions} positions."
        )
    if seed is not None:
        torch.manual_seed(seed)
    seq2seq = kind == "seq2seq"
    pipeline = PromptPipeline(prompts, room, tokenizer, seq2seq=seq2seq)
    heads = load_ilql_heads(model)
    generator: Any = TransformersEngine(lm, tokenizer)
    if heads is not None:
        generator = GuidedEngine(lm, tokenizer, heads=heads.to(device))
        options = {"beta": 1.0, **options}
    elif "beta" in options:
        raise ConfigError(f"--beta: {model} has no ILQL heads to be guided by.")
    sampler = TextSampler(generator, tokenizer, separator="\n" if seq2seq else None, device=device)
    return sampler.sample(pipeline[range(len(pipeline))], options).samples
