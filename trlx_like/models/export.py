"""Export of a policy: a folder that plain transformers can load, with the trained heads in a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from trlx_like.models.loading import save_model
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.saved_heads import HEADS_FILE

CARD = "README.md"
MARK = "<!-- Written by trlx_like. Without this line it is yours, and is never replaced. -->"
"""First line of each `CARD` that a program has written."""


def save_policy(policy: LanguagePolicy, tokenizer: Any, directory: Path, *, merged: bool, heads_class: str) -> None:
    """Write a policy's language model, its tokenizer, and its heads if it has any.

    Args:
        policy: The policy.
        tokenizer: Its tokenizer.
        directory: The folder.
        merged: Merge an adapter into the model's weights; otherwise the folder holds the adapter alone.
        heads_class: Ending of the class that loads model and heads together: `AutoModelForCausalLMWith<heads_class>`.
    """
    save_model(policy.lm, directory, merged)
    tokenizer.save_pretrained(directory)
    heads = {
        f"{part}.{name}": value.contiguous()
        for part in ("heads", "head_tops")
        for name, value in getattr(policy, part).state_dict().items()
    }
    if not heads:
        return
    save_file(heads, directory / HEADS_FILE)
    name = "AutoModelForCausalLM" if policy.start is None else "AutoModelForSeq2SeqLM"
    if (directory / CARD).exists():
        return
    (directory / CARD).write_text(
        f"{MARK}\n\nThe language model of this folder loads by itself with `transformers.{name}.from_pretrained`.\n"
        f"The heads that were trained on it are in `{HEADS_FILE}`; "
        f"`trlx_like.{name}With{heads_class}.from_pretrained` loads both.\n",
        encoding="utf-8",
    )
