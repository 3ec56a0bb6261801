"""Rounds of online trainers without a sample to learn from, such as rounds of ties alone: they make no step."""

from __future__ import annotations

import logging

from trlx_like.trainers.context import Metrics, Run

logger = logging.getLogger(__name__)


def note_empty(run: Run, samples: int) -> Metrics:
    """Count the rounds in a row that make no step, which `train.max_empty_rounds` limits.

    Args:
        run: The run. `Progress.empty_rounds` is the count.
        samples: The samples of the new round, over all processes.

    Returns:
        `rollout/empty_rounds`, the length of such a row of rounds, with its last round and with the round after it.
    """
    progress, limit = run.progress, run.config.train.max_empty_rounds
    before, progress.empty_rounds = progress.empty_rounds, 0 if samples else progress.empty_rounds + 1
    found = before if samples else progress.empty_rounds
    if not samples and not before and run.world.main:
        logger.warning(
            "Nothing of this round can be learned from, as with equal scores: it passes without a step, and so may "
            f"{limit} in a row (train.max_empty_rounds)."
        )
    if found == limit and not samples and run.world.main:
        logger.warning(
            f"Training ends at step {progress.step}, as nothing of {found} rounds in a row can be learned from "
            "(train.max_empty_rounds). Their metrics say why; `trlx-like test-reward` tries the reward on samples."
        )
    return {"rollout/empty_rounds": float(found)} if found else {}
