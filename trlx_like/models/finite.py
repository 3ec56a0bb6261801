"""Finds weights that are NaN or infinite, in models that are loaded or about to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trlx_like.errors import ConfigError


def bounds(tensors: Sequence[Tensor]) -> list[float]:
    """Return for each tensor what none of its entries exceeds but for rounding, NaN or infinity if an entry is that."""
    found: list[float] = []
    # The norm is ten times as fast as the largest entry. It can overflow where no entry does, and is not trusted then.
    for order in (2, torch.inf) if tensors else ():
        norms = torch._foreach_norm(list(tensors), order)
        found = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
        if all(map(math.isfinite, found)):
            break
    return found


@torch.no_grad()
def first_nonfinite(model: nn.Module, own: Callable[[Tensor], Tensor] = lambda weight: weight) -> str | None:
    """Return the name of the first parameter with an entry that is NaN or infinite; None if there is none.

    Args:
        model: The model.
        own: Returns the part of a parameter to look at.
    """
    named = {name: own(p) for name, p in model.named_parameters() if p.is_floating_point() and not p.is_meta}
    named = {name: p for name, p in named.items() if p.numel()}
    found = bounds(list(named.values()))
    return next((name for name, bound in zip(named, found, strict=True) if not math.isfinite(bound)), None)


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
