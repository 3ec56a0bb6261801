"""Loads models without reading their weights, so that each process can read its own part of them.

transformers finds the files and gives every weight its name, so hub names, several files, renamed weights, tied weights
and buffers are as in any load. What it gets from a file is no tensor but an `Unread` parameter. Left out on purpose:
weights that transformers computes from several saved ones, such as merged experts; such a model is read whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils

from trlx_like.errors import ConfigError
from trlx_like.functional.parts import Saved, Unread, unread
from trlx_like.models.adapters import read_adapter
from trlx_like.models.layout import blocks


@contextmanager
def unread_weights() -> Iterator[None]:
    """Let `from_pretrained` leave the weights of safetensors in their files, for a `with` block."""
    loader: Any = modeling_utils
    before, loader.safe_open = loader.safe_open, _File
    try:
        yield
    finally:
        loader.safe_open = before


def why_read(lm: PreTrainedModel) -> str | None:
    """Return in words why a model that was loaded in `unread_weights` has to be read whole; None if it has not to."""
    if not has_unread(lm):
        return "it is not in files of safetensors"
    try:
        blocks(lm)
    except ConfigError:
        return "it has no list of blocks"
    others = [name for name, weight in lm.named_parameters() if weight.dim() and not isinstance(weight, Unread)]
    return f"{others[0]} is not in its files as it is in the model" if others else None


def read_buffers(lm: PreTrainedModel) -> None:
    """Read the buffers of a model that are in its files, which `unread_weights` has taken for weights.

    Args:
        lm: The model, changed in place.
    """
    with torch.device("meta"):
        expected = dict(type(lm)(lm.config).named_buffers())
    for name, weight in list(lm.named_parameters()):
        if name in expected and isinstance(weight, Unread):
            owner, _, own = name.rpartition(".")
            module = lm.get_submodule(owner)
            del module._parameters[own]
            module.register_buffer(own, _whole(weight))


def _whole(weight: Unread) -> Tensor:
    return weight.saved.read(0, weight.numel()).view(weight.shape)


def reads_weights(given: Any) -> bool:
    """Return whether making an adapter may read or copy weights of the model: all but plain LoRA.

    Args:
        given: As for `read_adapter`; None: there is no adapter.
    """
    if given is None:
        return False
    config = read_adapter(given)
    of_weights = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")
    return config.peft_type != "LORA" or any(getattr(config, name, None) for name in of_weights)


def has_unread(module: nn.Module) -> bool:
    """Return whether a module has weights that are still in their files."""
    return any(isinstance(weight, Unread) for weight in module.parameters())


def lowest_blocks(lm: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a model that can be run to find out how its family computes.

    Args:
        lm: A causal language model.
        count: How many blocks it needs at least.

    Returns:
        The model itself if its weights are in memory. Otherwise a copy with its lowest blocks alone, which are read
        whole; the last of them stands in the places of all above.
    """
    if not has_unread(lm):
        return lm
    small = copy.deepcopy(lm)
    for at in range(count, len(blocks(small))):
        blocks(small)[at] = blocks(small)[count - 1]
    read: dict[Tensor, nn.Parameter] = {}
    for module in small.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, Unread):
                if weight not in read:
                    read[weight] = nn.Parameter(_whole(weight), weight.requires_grad)
                module._parameters[name] = read[weight]
    return small


class _File:
    """Stands for `safe_open` within `unread_weights`."""

    def __init__(self, path: str, framework: str = "pt", **_: Any) -> None:
        self.path = path
        self.file: Any = safe_open(path, framework=framework)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave the file to the garbage collector."""

    def get_slice(self, name: str) -> Any:
        """Return what transformers turns into a weight by `[...]` and `.to(device, dtype)`."""
        return _Entry(self.path, name, self.file.get_slice(name))


class _Entry:
    """Stands for a tensor of a file."""

    def __init__(self, path: str, name: str, saved: Any) -> None:
        self.path, self.name, self.saved = path, name, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self.saved, name)

    def __getitem__(self, index: Any) -> _Entry:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return an unread weight in a number format. A single number and integers are read."""
        shape = tuple(self.saved.get_shape())
        sample = self.saved[:0] if shape else self.saved[...]
        if not shape or not sample.is_floating_point():
            return cast(Tensor, self.saved[...].to(device=device, dtype=dtype))
        dtype = dtype or sample.dtype
        return unread(Saved(shape, partial(_read, self.path, self.name, shape, dtype)), dtype)


def _read(path: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, begin: int, end: int) -> Tensor:
    """Read a range of a flattened tensor from the rows that have it.

    Raises:
        ConfigError: If it has NaN or infinite values.
    """
    row = math.prod(shape[1:])
    first = begin // row if row else 0
    file: Any
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)[first : -(-end // row) if row else 0].flatten()
    values: Tensor = rows[begin - first * row : end - first * row].to(dtype, copy=True)
    if not values.isfinite().all():
        raise ConfigError(
            f"{path}: the weight {name} has NaN or infinite values. The file is damaged, or comes from a run that "
            "diverged: take an earlier checkpoint of it."
        )
    return values
