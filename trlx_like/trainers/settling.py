"""Puts numbers in the place of options that are `auto`, before a trainer does anything else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trlx_like.config import TRLConfig
from trlx_like.config.auto import context_for, is_auto, responses_for
from trlx_like.models.loading import positions_of

logger = logging.getLogger(__name__)


def settled(config: TRLConfig, data: Mapping[str, Any]) -> TRLConfig:
    """Return the configuration with a number for each option that is `auto`, and log them.

    The numbers follow from the model's files and the number of prompts alone. All processes find the same if each can
    read these files.

    Args:
        config: The configuration, which is not changed.
        data: The data arguments of the trainer, by name.

    Raises:
        ConfigError: If files of the model are damaged.
    """
    found: dict[str, Any] = {}
    if is_auto(config.train.seq_length):
        images = config.model.model_arch_type == "diffusion"
        found["train.seq_length"] = context_for(None if images else positions_of(config.model))
    if is_auto(getattr(config.method, "n_generations_per_prompt", None)):
        found["method.n_generations_per_prompt"] = responses_for(_rows(data.get("prompts")))
    if not found:
        return config
    if config.model.model_arch_type != "diffusion":
        logger.info("auto: %s.", ", ".join(f"{option} is {value}" for option, value in found.items()))
    return config.update(config, found)


def _rows(prompts: Any) -> int | None:
    """Return the number of prompts; None if they cannot be counted."""
    return None if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__") else len(prompts)
