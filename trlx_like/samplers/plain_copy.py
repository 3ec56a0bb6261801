"""The engine "copy": generates with a second set of the weights, with adapters merged.

It is faster than generating through adapter layers, and may use another number format than training
(`sampler.kwargs: {dtype: bfloat16}`). It takes the memory of one more model. Its weights are compared with the
policy's in every round, see `canary.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from trlx_like.data import Sampled
from trlx_like.errors import ConfigError
from trlx_like.functional.digest import Digest, digest
from trlx_like.models.merging import has_adapter, merged
from trlx_like.models.reference import create_reference_model
from trlx_like.samplers.engines import TransformersEngine, register_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@register_engine("copy")
class CopyEngine(TransformersEngine):
    """Generate with a copy of the model that `sync_weights` updates (engine "copy").

    Args:
        lm: The policy's language model.
        tokenizer: Decodes tokens to find stop strings.
        allowed: `allowed[previous, next]` is True if `next` may follow `previous`; None allows all. [V, V] bool
        dtype: The number format of the copy's weights; None is that of the model.

    Raises:
        ConfigError: If there is no number format of that name.
    """

    def __init__(
        self, lm: PreTrainedModel, *args: Any, dtype: Literal["float32", "bfloat16", "float16"] | None = None
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"sampler.kwargs.dtype ({dtype!r}) must be one of {', '.join(DTYPES)}.")
        copied = merged(lm) if has_adapter(lm) else create_reference_model(lm)
        super().__init__(copied.eval().requires_grad_(False), *args)
        self.version = -1
        self.dtype = None if dtype is None else DTYPES[dtype]
        if self.dtype is not None:
            _convert(self.lm, self.dtype)

    @torch.no_grad()
    def sync_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy the present weights of the policy, with adapters merged."""
        self.version = version
        held = dict(self.lm.named_parameters())
        for name, weight in weights:
            if held[name].device != weight.device:
                self.lm.to(weight.device)  # type: ignore[arg-type]
            held[name].copy_(weight)

    def generate(self, *args: Any, **options: Any) -> Sampled:
        """Generate as the engine "transformers", and note the version of the weights."""
        sampled = super().generate(*args, **options)
        sampled.version = torch.full(sampled.response.shape[:1], self.version, device=sampled.response.device)
        return sampled

    def digests(self) -> Mapping[str, Digest]:
        """Compute the checksum of each weight of the copy."""
        return {name: digest(weight) for name, weight in self.lm.named_parameters()}


def _convert(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert weights to a number format, and each buffer to the format that it has in a model made in this one.

    `lm.to(dtype)` would convert rotary tables too, and distant positions would become equal in 16 bits. The buffers of
    a model whose class takes more than a configuration keep their format.
    """
    made: dict[str, Tensor] = {}
    with suppress(TypeError), torch.device("meta"), local_torch_dtype(dtype):
        made = dict(type(lm)(lm.config).named_buffers())
    for weight in lm.parameters():
        weight.data = weight.data.to(dtype)
    for name, buffer in lm.named_buffers():
        if name in made:
            buffer.data = buffer.data.to(made[name].dtype)
