"""Watches for signs that training has diverged, and rolls back to a checkpoint if `train.on_divergence` says so."""

from __future__ import annotations

import logging
import math
import statistics

from trlx_like.errors import CheckpointError, DivergenceError, raised_as
from trlx_like.trainers.context import Metrics, Run
from trlx_like.trainers.optimise import Optimisation

logger = logging.getLogger(__name__)

NO_ENTROPY = 1e-4
"""Entropy, in nats per token, below which the policy practically always generates the same text."""
LOSS_FACTOR = 100
"""A loss above this many times the median of the last losses is a sign, if it is also above `LEAST_LOSS`."""
LEAST_LOSS = 1.0
"""Smaller losses are never a sign: those of policy gradients are near 0, and so is their median."""
LOSSES = 50
"""Number of last losses over which the median is taken."""
FEWEST_LOSSES = 20


class DivergenceWatch:
    """Look for signs of divergence in the metrics of each step, and act on them as `train.on_divergence` says.

    Args:
        run: The run.
        optimisation: Makes its steps; a rollback scales its learning rate.
    """

    def __init__(self, run: Run, optimisation: Optimisation) -> None:
        self.run, self.optimisation = run, optimisation
        self._warned: set[str] = set()

    def watch(self, metrics: Metrics) -> None:
        """Check the metrics of a step, which are the same on all processes. Each kind of sign is warned of once.

        Args:
            metrics: The metrics of the step; those of the round are in the first step of a round.

        Raises:
            DivergenceError: At a sign, unless `train.on_divergence` is "warn".
        """
        train, progress = self.run.config.train, self.run.progress
        signs = self._signs(metrics)
        if math.isfinite(loss := metrics.get("losses/total_loss", math.nan)):
            progress.losses = [*progress.losses, loss][-LOSSES:]
        for kind, words in signs.items():
            if train.on_divergence != "warn":
                raise DivergenceError(
                    f"Step {progress.step}: {words}. train.on_divergence is {train.on_divergence!r}. Try a smaller "
                    "optimizer.kwargs.lr."
                )
            if kind not in self._warned and self.run.world.main:
                logger.warning("Step %d: %s. The run may have diverged; see train.on_divergence.", progress.step, words)
            self._warned.add(kind)

    def _signs(self, metrics: Metrics) -> dict[str, str]:
        """Return the signs of divergence in the metrics of a step: words by kind."""
        signs, limit, losses = {}, self.run.config.train.stop_kl, self.run.progress.losses
        if metrics.get("policy/entropy", 1.0) < NO_ENTROPY:
            signs["entropy"] = f"policy/entropy is {metrics['policy/entropy']:.2g}, so the policy always says the same"
        if limit is not None and metrics.get("policy/kl", 0.0) > limit:
            signs["kl"] = f"policy/kl is {metrics['policy/kl']:.4g}, above train.stop_kl ({limit:g})"
        if len(losses) >= FEWEST_LOSSES:
            usual = statistics.median(map(abs, losses))
            loss = abs(metrics.get("losses/total_loss", 0.0))
            if loss > max(LOSS_FACTOR * usual, LEAST_LOSS):
                signs["loss"] = f"losses/total_loss is {loss:.4g}, more than {LOSS_FACTOR} times its median {usual:.2g}"
        return signs

    def roll_back(self, error: DivergenceError) -> None:
        """Restore the newest checkpoint with a smaller learning rate, and record it in history.jsonl.

        Every process calls it. If a checkpoint is restored twice, the factor is applied twice.

        Args:
            error: The error that reports the sign of divergence.

        Raises:
            DivergenceError: `error` itself, if `train.on_divergence` is not "rollback", `train.max_rollbacks` is
                reached, or there is no checkpoint.
        """
        train, progress, folder = self.run.config.train, self.run.progress, self.run.folder
        step, count = progress.step, progress.rollbacks + 1
        if train.on_divergence != "rollback":
            raise error
        if count > train.max_rollbacks:
            raise DivergenceError(f"{error} The run was rolled back {train.max_rollbacks} times before.") from error
        with raised_as(DivergenceError, CheckpointError, f"{error} It cannot be rolled back"):
            folder.load(self.run.directory, self.run.state)
        rate = self.optimisation.scale_learning_rate(train.rollback_lr_factor ** (count - progress.rollbacks))
        progress.rollbacks, progress.nonfinite_in_row = count, 0
        if self.run.world.main:
            logger.warning(
                f"{error} Back to step {progress.step} with a learning rate of {rate:.3g} (rollback {count} of at most "
                f"{train.max_rollbacks})."
            )
        folder.note(
            {"event": "rollback", "step": step, "to_step": progress.step, "learning_rate": rate, "why": str(error)}
        )
