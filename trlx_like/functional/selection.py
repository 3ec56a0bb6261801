"""Which sampled responses are good enough to imitate: thresholds on their scores, one for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MARGIN = 1e-3
"""How far thresholds stay from the lowest and the highest of them, in units of the score."""


def percentile_at(step: int, start: float, end: float, steps: int) -> float:
    """start + (end - start) * step / steps, for step 0 .. steps - 1: `end` itself is never reached.

    Source: trlX `accelerate_rft_trainer.py:make_experience`. The rising filter is that of ReST's improve steps
    (Gulcehre et al. 2023, arXiv:2308.08998, sec. 3).
    """
    return start + (end - start) * step / steps


def score_thresholds(scores: Sequence[Tensor], percentile: float) -> Tensor:
    """For each prompt the `percentile` quantile of its own scores, then kept `MARGIN` inside the range of them all.

    The quantile is linear between neighbours. Where scores are few numbers (right or wrong) it is often one of them:
    then the margin leaves out what the worst prompts get at best, and keeps what the best prompts get. If all
    thresholds are closer together than twice the margin, they are the highest less the margin.

    Source: trlX `accelerate_rft_trainer.py:make_experience`. Shapes: scores, one or more [n] each -> [P] float64.
    """
    quantiles = torch.stack([torch.quantile(of_prompt.double(), percentile) for of_prompt in scores])
    return quantiles.clamp(min=quantiles.min() + MARGIN).clamp(max=quantiles.max() - MARGIN)
