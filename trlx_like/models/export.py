"""Saving of models and policies: folders that plain transformers can load, with heads in a file of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.models.merging import has_adapter, merged
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.saved_heads import HEADS_FILE
from trlx_like.models.sources import no_progress_bars

logger = logging.getLogger(__name__)

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


def save_model(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """Save a model for transformers to load; of a model with an adapter, the adapter alone in peft's format.

    Args:
        lm: The model.
        directory: The folder.
        merge: Save the whole model with its adapter merged. This also happens if the adapter's folder could not name
            the model, because that has random weights or was given in memory.

    Raises:
        ConfigError: See `check_folder`.
    """
    check_folder(lm, directory, merge)
    alone = _alone(lm, merge)
    saved = lm if alone or not has_adapter(lm) else merged(lm)
    copies = {} if alone else _copies(saved)
    if copies:
        logger.info("%d weights that layers share are saved for each, such as %s.", len(copies), min(copies))
    with no_progress_bars():
        saved.save_pretrained(directory, state_dict={**saved.state_dict(), **copies} if copies else None)


def _copies(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Copy each weight that several layers share, once for every name after its first.

    Left out are names that the class of the model declares as tied: transformers ties these when it loads a model, and
    refuses to save other shared weights. A file with the copies loads as a model that computes the same. Its layers
    share weights only if their class makes them do so.
    """
    tied = getattr(lm, "all_tied_weights_keys", {})
    names: dict[Tensor, list[str]] = {}
    for name, weight in lm.named_parameters(remove_duplicate=False):
        if name not in tied:
            names.setdefault(weight, []).append(name)
    return {name: weight.detach().clone() for weight, (_, *further) in names.items() for name in further}


def check_folder(lm: PreTrainedModel, directory: Path, merge: bool = False) -> None:
    """Raise ConfigError if a folder holds the other kind, adapter or whole model, as both would be loaded together.

    Args:
        lm: The model that will be saved.
        directory: The folder.
        merge: As in `save_model`.
    """
    alone = _alone(lm, merge)
    if (directory / ("config.json" if alone else "adapter_config.json")).exists():
        kinds = ("an adapter", "a whole model")
        raise ConfigError(
            f"{directory} holds {kinds[alone]}, which would be mixed with {kinds[not alone]}; name another folder."
        )


def _alone(lm: PreTrainedModel, merge: bool) -> bool:
    """Return True if the adapter is saved without its model."""
    return has_adapter(lm) and not merge and bool(lm.peft_config["default"].base_model_name_or_path)
