"""Chat templates of model families, those that the package ships and those in families/, and tokenizers for them.

The files mark what the assistant says, as templates for training do. Without the marks they are what models ship.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trlx_like.models import tokenizer

FOLDERS = (Path(__file__).parent / "families", Path(tokenizer.__file__).parent / "chat_templates")


@dataclass(frozen=True)
class Family:
    """Special tokens of a family. bos: its own encoding begins with it."""

    eos: str
    special: tuple[str, ...]
    bos: str | None = None


FAMILIES = {
    "qwen2": Family("<|im_end|>", ("<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>")),
    "llama3": Family("<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), "<|begin_of_text|>"),
    "mistral": Family("</s>", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), "<s>"),
    "gemma": Family("<eos>", ("<start_of_turn>", "<end_of_turn>"), "<bos>"),
    "phi3": Family("<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "zephyr": Family("</s>", (), "<s>"),
    "chatml": Family("<|im_end|>", ("<|im_start|>",)),
    "alpaca": Family("</s>", (), "<s>"),
    "vicuna": Family("</s>", (), "<s>"),
    "qwen3": Family("<|im_end|>", ("<|im_start|>", "<|endoftext|>", "<think>", "</think>")),
}


def template(family: str, marked: bool = False) -> str:
    name = {"qwen2": "qwen"}.get(family, family)
    file = next(folder / f"{name}.jinja" for folder in FOLDERS if (folder / f"{name}.jinja").is_file())
    text = file.read_text(encoding="utf-8")
    return text if marked else re.sub(r"{%-? *(end)?generation *-?%}", "", text)


def family_tokenizer(family: str, marked: bool = False, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Its special tokens, <pad>, and one token a printable character; two line breaks are one token, as in many."""
    tokens = FAMILIES[family]
    bos = [tokens.bos] if tokens.bos else []
    special = [tokens.eos, "<pad>", *bos, *tokens.special]
    vocabulary = {token: number for number, token in enumerate([*special, "\n\n", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\n|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos:
        start = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[(bos[0], vocabulary[bos[0]])])
        tokenizer.post_processor = start
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos or tokens.eos, pad_token="<pad>", bos_token=tokens.bos, unk_token="?"
    )
    made.chat_template = template(family, marked)
    return made
