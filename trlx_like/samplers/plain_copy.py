"""The engine `copy`: a second set of the weights to generate with, adapters merged into it.

It generates faster than through the layers of an adapter, and in other numbers (`sampler.kwargs: {dtype: bfloat16}`)
than those that are trained, for the memory of one more model. What it holds is compared with what is trained in every
round, see `canary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trlx_like.errors import ConfigError
from trlx_like.functional.digest import Digest, digest
from trlx_like.models import create_reference_model, has_adapter, merged, plain_weights
from trlx_like.samplers.engines import TransformersEngine, register_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@register_engine("copy")
class CopyEngine(TransformersEngine):
    """`TransformersEngine` with a copy of the model, which `sync_weights` brings up to date.

    dtype: of the copy's weights; None: those of the model. ConfigError for another name.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        allowed: Tensor | None = None,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"sampler.kwargs.dtype ({dtype!r}) must be one of {', '.join(DTYPES)}.")
        copied = merged(lm) if has_adapter(lm) else create_reference_model(lm)
        super().__init__(copied.eval().requires_grad_(False), tokenizer, allowed)
        self.dtype = None if dtype is None else DTYPES[dtype]
        for weight in self.lm.parameters() if self.dtype is not None else ():
            # The weights alone: in a half-precision buffer far positions would fall together.
            weight.data = weight.data.to(self.dtype)

    @torch.no_grad()
    def sync_weights(self, policy: nn.Module) -> None:
        held = dict(self.lm.named_parameters())
        for name, weight in plain_weights(policy):
            if held[name].device != weight.device:
                self.lm.to(weight.device)  # type: ignore[arg-type]
            held[name].copy_(weight)

    def digests(self) -> Mapping[str, Digest]:
        return {name: digest(weight) for name, weight in self.lm.named_parameters()}
