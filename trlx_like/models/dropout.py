"""Dropout and router noise in a model: finding it, removing it, and switching it off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _probabilities(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Find the attributes that hold the dropout probabilities of a model, and the noise of its routers.

    Many families keep them in attributes of modules, such as `attention_dropout`, `attn_pdrop` and `layerdrop`. Those
    with experts multiply the input of a router by noise, as large as `jitter_noise` or `moe_jitter_eps` says.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            found = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, torch.nn.Dropout))
            if found and isinstance(value, float):
                yield module, name


def has_dropout(model: torch.nn.Module) -> bool:
    """Test whether any dropout probability or router noise of a model is above 0."""
    return any(getattr(module, name) > 0 for module, name in _probabilities(model))


def disable_dropout(model: torch.nn.Module) -> None:
    """Set all dropout probabilities and router noise to 0, so that sampling and training use the same distribution."""
    for module, name in _probabilities(model):
        if name != "router_jitter_noise":  # Phimoe's is a bound for the choice of experts, in evaluation too
            setattr(module, name, 0.0)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for the duration of a block."""
    if not any(module.training for module in model.modules()):
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
