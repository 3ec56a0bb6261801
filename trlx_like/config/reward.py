"""The section `reward`: how reward functions are run, and what becomes of what they cannot score."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from trlx_like.config.section import Section


class RewardFnConfig(Section):
    """The section `reward`: how the reward function is run."""

    section: ClassVar[str] = "reward"

    weights: list[float] | None = None
    """Weight of each function where reward_fn is a list of them; null: 1 each."""
    time_limit: float | None = Field(default=None, gt=0)
    """Seconds that a function may take for a batch (a chunk of a round, or an evaluation); null: no limit."""
    sample_time_limit: float | None = Field(default=None, gt=0)
    """Seconds for a sample. With it functions are called with one sample at a time; null: with the whole batch."""
    on_error: Literal["raise", "abstain", "value"] = "raise"
    """What a failure does: it ends the run; its samples are left out (None); or they get `error_value`."""
    error_value: float = 0.0
    """Reward of samples whose function failed, with on_error: value."""
    max_abstained: float = Field(default=1.0, ge=0, le=1)
    """Fraction of a round's or an evaluation's samples that may be without a reward; above it the run ends."""
    workers: int = Field(default=0, ge=0)
    """Processes (for each that trains) in which functions run while text is generated, and can be killed; 0: none."""
    worker_memory: int | None = Field(default=None, ge=1)
    """MiB of resident memory above which a worker is killed (on Linux); null: no limit."""
    worker_start_limit: float = Field(default=300.0, gt=0)
    """Seconds in which a worker has to have imported its functions and loaded their models."""

    def inert(self) -> list[str]:
        without_workers = [] if self.workers else ["worker_memory", "worker_start_limit"]
        without_value = [] if self.on_error == "value" else ["error_value"]
        return [name for name in (*without_workers, *without_value) if self.changed(name)]
