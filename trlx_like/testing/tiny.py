"""A tiny language model, its tokenizer and a run of seconds, made without a file and without the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, PreTrainedTokenizerFast

from trlx_like.config import TRLConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PROMPTS = ["ab", "abcdefg", "b", "the cats", "zz top"]
"""Prompts of different lengths for the tiny tokenizer."""
GENERATION = {"max_new_tokens": 6, "eos_token_id": list(range(0, 32, 4)), "temperature": 0.7}
"""Generation options for the tiny model: every fourth token ends a response, so that their lengths differ."""
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def count_letters(outputs: Sequence[str], **_: Any) -> list[float]:
    """Return a reward that differs between samples: a's are good, length is bad."""
    return [output.count("a") - 0.1 * len(output) for output in outputs]


def tiny_tokenizer(pad: bool = True, bos: bool = False, ends: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each of `LETTERS`, and for <eos> (0), <pad> (1) and <bos> (2).

    Args:
        pad: Whether there is a <pad>; without it, <eos> pads.
        bos: Whether there is a <bos>.
        ends: Whether <eos> is put after a text, as T5's tokenizer does.
    """
    special = ["<eos>", *(["<pad>"] if pad else []), *(["<bos>"] if bos else [])]
    vocabulary = {token: number for number, token in enumerate([*special, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>" if pad else None,
        bos_token="<bos>" if bos else None,
        unk_token=".",
        padding_side="left",
    )


def tiny_gpt2(**options: Any) -> GPT2Config:
    """Return the configuration of a GPT-2 with two layers and a vocabulary of 32 tokens, with further options."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 32}
    return GPT2Config(**{**sizes, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1, **options})


def tiny_run(trainer: type[Any], method: Mapping[str, Any], **options: Any) -> TRLConfig:
    """Return the configuration of a run of a few steps on a tiny model with random weights.

    Two rounds of several steps, whose last batch is partial if a round has no multiple of three samples.

    Args:
        trainer: The trainer class.
        method: Options of its method.
        options: Further options, as of `TRLConfig.update`: sections such as `train={"seed": 1}`, or dotted keys.
    """
    tiny: dict[str, dict[str, Any]] = {
        "model": {"model_path": tiny_gpt2(**NO_DROPOUT)},
        "tokenizer": {"tokenizer_path": tiny_tokenizer()},
        "optimizer": {"name": "adamw", "kwargs": {"lr": 3e-3}},
        "method": {"name": trainer.method_class.__name__, **method},
        "train": {
            "trainer": trainer.__name__,
            "seq_length": 20,
            "batch_size": 3,
            "epochs": 2,
            "total_steps": 100,
            "seed": 3,
            "checkpoint_interval": 1000,
            "eval_interval": 1000,
        },
    }
    return TRLConfig.update(tiny, options)
