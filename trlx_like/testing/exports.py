"""Compare what a run exports with the policy that it was exported from, by what plain transformers load of it."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trlx_like.models.faster import faster
from trlx_like.testing.compare import assert_same, must
from trlx_like.testing.tiny import PROMPTS
from trlx_like.trainers.callbacks import Callback


class Remember(Callback):
    """Keep the policy's logits as they are at each save, by the name of the checkpoint."""

    def __init__(self) -> None:
        self.scores: dict[str, Tensor] = {}

    def on_save(self, trainer: Any, directory: Path) -> None:
        if hasattr(trainer.model, "lm"):
            self.scores[directory.name] = logits(trainer.model.lm, trainer.tokenizer)


def logits(model: Any, tokenizer: Any) -> Tensor:
    """Return the logits of `PROMPTS`. [B, T, V]"""
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    training = model.training
    with torch.no_grad():
        scores: Tensor = model.eval()(**batch).logits
    model.train(training)
    return scores


def check_export(path: Path, trainer: Any, scores: Tensor, loads_as: Any) -> None:
    """Compare the model and the tokenizer in an exported folder with those of the trainer."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    config = trainer.model.lm.config
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else loads_as or AutoModelForCausalLM
    said = BufferingHandler(1000)  # keeps what is logged
    said.setLevel(logging.WARNING)
    logging.getLogger("transformers").addHandler(said)
    try:
        model = kind.from_pretrained(path, attn_implementation=config._attn_implementation)  # to the bit
        tokenizer = AutoTokenizer.from_pretrained(path)
    finally:
        logging.getLogger("transformers").removeHandler(said)
    must(not said.buffer, f"{path.name}: {[record.getMessage() for record in said.buffer]}")
    assert_same(logits(faster(model), tokenizer), scores, f"the logits of {path.parent.name}/{path.name}")
    same = tokenizer(PROMPTS).input_ids == trainer.tokenizer(PROMPTS).input_ids
    must(same, f"{path.parent.name}/{path.name}: the tokenizer is another one.")
    must(not [*path.glob("*.bin"), *path.glob("*.pt")], f"{path.parent.name}/{path.name}: holds pickled weights.")
