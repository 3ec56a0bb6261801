"""Tiny real models and tokenizers, made in the test and loaded through the real loading code."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MT5Config,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
    UMT5Config,
)

from trlx_like.testing.tiny import LETTERS as LETTERS, NO_DROPOUT, tiny_gpt2, tiny_tokenizer as tiny_tokenizer

FAMILIES = ("gpt2", "llama", "qwen3", "gpt_neox", "opt")
ODD_FAMILIES = ("gemma2", "cohere", "granite", "bloom", "falcon", "opt_projected")
"""Soft-capped logits, scaled logits (two), blocks that return tuples (two), a last hidden state of its own width."""
SEQ2SEQ_FAMILIES = ("t5", "mt5", "umt5", "bart")
"""Hidden states scaled before the head; not scaled; a position bias in every block; absolute positions."""


def tiny_config(family: str = "gpt2", layers: int = 2, vocabulary: int = 32, **extra: Any) -> PretrainedConfig:
    ids = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    if family in SEQ2SEQ_FAMILIES:
        return _seq2seq_config(family, layers, {"vocab_size": vocabulary, **ids, "decoder_start_token_id": 1, **extra})
    if family == "gpt2":
        return tiny_gpt2(**{"n_layer": layers, "vocab_size": vocabulary, **extra})
    sizes = {"num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    common = {"vocab_size": vocabulary, **sizes, **ids}
    if family in ("opt", "opt_projected"):
        width = 16 if family == "opt" else 8
        return OPTConfig(ffn_dim=32, word_embed_proj_dim=width, **{**common, **extra})
    if family == "bloom":
        names = {"n_layer": layers, "n_head": 2, "hidden_size": 16}
        return BloomConfig(vocab_size=vocabulary, **{**names, **ids, **extra})
    if family == "falcon":
        return FalconConfig(**{**common, **extra})
    common["intermediate_size"] = 32
    if family == "gpt_neox":
        return GPTNeoXConfig(**{**common, **extra})
    common["num_key_value_heads"] = 1
    if family == "gemma2":
        caps = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
        return Gemma2Config(head_dim=8, **{**common, **caps, "sliding_window": 4, **extra})
    if family == "cohere":
        return CohereConfig(**{**common, "logit_scale": 0.25, **extra})
    if family == "granite":
        scales = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
        return GraniteConfig(**{**common, **scales, **extra})
    if family == "llama":
        return LlamaConfig(**{**common, **extra})
    if family == "mistral":
        return MistralConfig(**{**common, "sliding_window": 4, **extra})
    if family == "gemma3n":
        streams = {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * layers}
        shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocabulary}
        kinds = {"layer_types": (["sliding_attention", "full_attention"] * layers)[:layers], "sliding_window": 4}
        return Gemma3nTextConfig(head_dim=8, **{**common, **streams, **shared, **kinds, **extra})
    if family == "mixtral":
        return MixtralConfig(**{**common, "num_local_experts": 4, **extra})
    if family == "phimoe":
        return PhimoeConfig(**{**common, "num_local_experts": 4, **extra})
    if family == "phi3_longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8, **factors}
        return Phi3Config(original_max_position_embeddings=8, **{**common, "rope_parameters": rope, **extra})
    if family in ("qwen3", "qwen3_window"):
        window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        return Qwen3Config(head_dim=8, **{**common, **(window if family == "qwen3_window" else {}), **extra})
    raise ValueError(f"no tiny model of the family {family}")


def _seq2seq_config(family: str, layers: int, common: dict[str, Any]) -> PretrainedConfig:
    """`layers` are the decoder's; the encoder has one more. With one less generate() would not give T5 a cache."""
    if family == "bart":
        sizes = {"d_model": 16, "max_position_embeddings": 64, "encoder_layers": layers + 1, "decoder_layers": layers}
        parts = {
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        }
        return BartConfig(**{**sizes, **parts, **common})
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_heads": 2,
        "num_layers": layers + 1,
        "num_decoder_layers": layers,
    }
    kinds: dict[str, Any] = {"t5": T5Config, "mt5": MT5Config, "umt5": UMT5Config}
    factor = 1.0 if family == "t5" else 0.1  # without T5's scale logits would start so large that rounding shows
    config: PretrainedConfig = kinds[family](
        **{**sizes, "relative_attention_num_buckets": 8, "initializer_factor": factor, **common}
    )
    return config


def tiny_lm(family: str = "gpt2", seed: int = 0, **extra: Any) -> PreTrainedModel:
    """A random language model of a few thousand parameters, in evaluation mode."""
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if family in SEQ2SEQ_FAMILIES else AutoModelForCausalLM
    return kind.from_config(tiny_config(family, **extra)).eval()


def save_tiny(folder: Path, family: str = "gpt2", **extra: Any) -> str:
    """A folder with a tiny model and tokenizer, as a user's `model.model_path`."""
    tiny_lm(family, **extra).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def saved_tiny() -> str:
    """A folder with a tiny model and tokenizer, which this process deletes when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_lm_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_tiny(folder, **NO_DROPOUT)
