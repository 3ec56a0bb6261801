"""Finds weights that are NaN or infinite, in models that are loaded or about to be saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trlx_like.errors import ConfigError


@torch.no_grad()
def first_nonfinite(model: nn.Module, own: Callable[[Tensor], Tensor] = lambda weight: weight) -> str | None:
    """Return the name of the first parameter with an entry that is NaN or infinite; None if there is none.

    Args:
        model: The model.
        own: Returns the part of a parameter to look at.
    """
    named = {name: own(p) for name, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}
    named = {name: p for name, p in named.items() if p.numel()}
    if not named:
        return None
    largest = torch._foreach_norm(list(named.values()), torch.inf)
    finite = torch.stack([value.to(largest[0].device, torch.float64) for value in largest]).isfinite().tolist()
    return next((name for name, good in zip(named, finite, strict=True) if not good), None)


def require_finite(model: nn.Module, option: str) -> None:
    """Check the weights of a model that was loaded.

    Args:
        model: The model.
        option: The option and path that it comes from, for the error.

    Raises:
        ConfigError: If a weight is NaN or infinite. It names the first such parameter.
    """
    if name := first_nonfinite(model):
        raise ConfigError(
            f"{option}: the weight {name} has NaN or infinite values. The files are damaged, or come from a run that "
            "diverged: take an earlier checkpoint of it."
        )
