"""What `trlx-like estimate` advises when a run does not fit: the smallest change of its options that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from operator import or_
from typing import Any

from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.estimate import estimate
from trlx_like.optim import BOUNDED, OPTIMIZERS


def smallest_change(config: TRLConfig, gpus: int, memory: float) -> dict[str, Any] | None:
    """Find the first change of a list that makes a run fit, or else how many of them together.

    Args:
        config: The complete configuration, of a run that does not fit.
        gpus: Number of GPUs.
        memory: GiB of each.

    Returns:
        Options with their new values; None if even all changes together do not suffice.
    """
    changes = list(_changes(config, gpus))
    together: list[dict[str, Any]] = list(accumulate(changes, or_))
    for options in (*changes, *together[1:]):
        try:
            if estimate(TRLConfig.update(config.to_dict(), options), gpus, memory).fits:
                return options
        except ConfigError:  # this change is not for this run
            continue
    return None


def _changes(config: TRLConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield changes that save memory, those that cost least first."""
    train, model, optimizer = config.train, config.model, config.optimizer.name
    copies = not isinstance(optimizer, str) or OPTIMIZERS.canonical(optimizer) not in BOUNDED
    if train.undo_nonfinite_updates and copies:
        yield {"train.undo_nonfinite_updates": False}
    if not config.backend.gradient_checkpointing:
        yield {"backend.gradient_checkpointing": True}
    size = min(train.minibatch_size or math.inf, train.batch_size // gpus)
    while size > 1:
        size = next(part for part in range(int(size) // 2, 0, -1) if train.batch_size % part == 0)
        yield {"train.minibatch_size": size}
    if "chunk_size" in type(config.method).model_fields and config.sampler.batch_size is None:
        yield {"sampler.batch_size": 8}
    if config.backend.kind == "ddp" and gpus > 1:
        yield {"backend.kind": "fsdp"}
    if model.peft_config is None:
        yield {"model.peft_config": {"peft_type": "LORA", "r": 16}}
        yield {"model.peft_config": {"peft_type": "LORA", "r": 16}, "model.dtype": "bfloat16"}
    if model.quantization is None:
        adapter = model.peft_config or {"peft_type": "LORA", "r": 16}
        yield {"model.peft_config": adapter, "model.dtype": "bfloat16", "model.quantization": "nf4"}
