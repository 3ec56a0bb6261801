"""Score thresholds, one per prompt, that decide which sampled responses are good enough to imitate (RFT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MARGIN = 1e-3
"""Distance of all thresholds from the lowest and the highest of them, in units of the score."""


def percentile_at(step: int, start: float, end: float, steps: int) -> float:
    """Compute the percentile of an improve step on a linear schedule: start + (end - start) * step / steps.

    Source: trlX `accelerate_rft_trainer.py:make_experience`. A filter that rises from step to step is that of ReST's
    improve steps (Gulcehre et al. 2023, arXiv:2308.08998, sec. 3).

    Args:
        step: The improve step, from 0 to steps - 1.
        start: The percentile at step 0.
        end: The percentile that step `steps` would have; it is never reached.
        steps: The number of improve steps.

    Returns:
        The percentile, as a fraction.
    """
    return start + (end - start) * step / steps


def score_thresholds(scores: Sequence[Tensor], percentile: float) -> Tensor:
    """Compute for each prompt a quantile of its own scores, kept `MARGIN` inside the range of all prompts' quantiles.

    The quantile interpolates linearly. With few distinct scores (right or wrong) it often equals one of them. The
    margin then excludes the best responses of the worst prompts, and keeps the best responses of the best prompts. If
    all thresholds are within twice the margin, they become the highest one minus the margin.

    Source: trlX `accelerate_rft_trainer.py:make_experience`. Difference: where a prompt's scores differ, its threshold
    is above the lowest of them. Otherwise, if good responses are rarer than the quantile, the worst ones would tie with
    it, and all responses of the prompt would be imitated.

    Args:
        scores: The scores of each prompt's responses; P tensors, each [n] with its own n >= 1.
        percentile: The quantile, as a fraction.

    Returns:
        The thresholds. [P] float64
    """
    quantiles = torch.stack([torch.quantile(of_prompt.double(), percentile) for of_prompt in scores])
    thresholds = quantiles.clamp(min=quantiles.min() + MARGIN).clamp(max=quantiles.max() - MARGIN)
    worst, best = (torch.stack([of(of_prompt.double()) for of_prompt in scores]) for of in (torch.min, torch.max))
    above = torch.nextafter(worst, best)  # the worst itself where all are equal
    return torch.where(worst < best, thresholds.maximum(above), thresholds)
