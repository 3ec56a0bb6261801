"""Generation settings that mean what they say: nothing is taken from a model's own generation defaults.

A model's `generation_config` may ask for top-k 50 or a repetition penalty. A loss that does not know of it would take
log-probabilities of another distribution than the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trlx_like.errors import ConfigError


def generation_config(options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """A complete GenerationConfig: plain sampling, changed only by `options`."""
    known = GenerationConfig().to_dict()
    for name in options:
        if name not in known:
            raise ConfigError(f"method.gen_kwargs.{name} is not an option of transformers' generate().")
    neutral: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    if options.get("do_sample") is False:
        neutral = {}
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    return GenerationConfig(**{**neutral, **special, **options})


def eos_ids(config: GenerationConfig) -> list[int]:
    """The ids that end a response."""
    eos = config.eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
