"""The section `reward`: how reward functions are run, and what happens to samples that they cannot score."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trlx_like.config.resume import Applied
from trlx_like.config.section import Section


class RewardFnConfig(Section):
    """Configure how the reward function is run: the section `reward`."""

    weights: Applied[list[float] | None] = None
    """Weight of each reward function, if there are several; null: 1 for each."""
    time_limit: Applied[float | None] = Field(default=None, gt=0)
    """Maximum seconds of one call of a reward function, which scores a chunk or an evaluation; null: no limit."""
    sample_time_limit: Applied[float | None] = Field(default=None, gt=0)
    """Maximum seconds for each sample; functions are then called with one sample at a time. Null: whole batches."""
    on_error: Applied[Literal["raise", "abstain", "value"]] = "raise"
    """What to do if scoring fails: end the run, leave the samples out, or give them `error_value`."""
    error_value: Applied[float] = 0.0
    """Reward of samples that could not be scored, if `on_error` is value."""
    max_abstained: Applied[float] = Field(default=1.0, ge=0, le=1)
    """Maximum fraction of the samples of a round or evaluation without a reward; above it the run ends."""
    workers: Applied[int] = Field(default=0, ge=0)
    """Worker processes, for each training process, that score while text is generated; 0: score in the trainer."""
    worker_memory: Applied[int | None] = Field(default=None, ge=1)
    """Resident memory in MiB above which a worker is killed (on Linux); null: no limit."""
    worker_start_limit: Applied[float] = Field(default=300.0, gt=0)
    """Maximum seconds for a worker to import its functions and load their models."""

    def acting(self) -> dict[str, bool]:
        of_workers = dict.fromkeys(("worker_memory", "worker_start_limit"), self.workers > 0)
        return {**of_workers, "error_value": self.on_error == "value"}
