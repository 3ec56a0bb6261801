"""The exceptions that a user can correct. Each names the option or argument, its value, and what would be right.

`exit_code` is the exit code of the command line: 2 for a mistake of the user, another number if a calling program has
to tell the case apart. Any other exception is an error in this library, and shows its traceback.
"""

from __future__ import annotations

from typing import ClassVar

from trlx_like.redact import redacted


class TrlxError(Exception):
    """Base class of every error that the user can correct."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        """Return the message without secrets."""
        return redacted(super().__str__())


class ConfigError(TrlxError):
    """Report a configuration that cannot run: an unknown key, a wrong type, an impossible value, or a conflict."""


class RegistryError(TrlxError):
    """Report a name that is not registered or is already taken, or a plugin that cannot be loaded."""


class DataError(TrlxError):
    """Report prompts, samples or files that cannot be trained on; the message names the row."""


class RewardError(TrlxError):
    """Report a reward or metric function that raised an exception or returned something unusable."""


class CheckpointError(TrlxError):
    """Report a checkpoint that is missing, damaged, or from another run."""


class SamplerError(TrlxError):
    """Report a sampler that does not sample from the trained policy. Nothing was learned from its samples."""

    exit_code = 3


class ProcessError(TrlxError):
    """Report that another process of the run died, was stopped, or makes no progress."""

    exit_code = 1


class DivergenceError(TrlxError):
    """Report that training has diverged and `train.on_divergence` does not let it continue."""

    exit_code = 1


class NonFiniteError(DivergenceError):
    """Report that losses, gradients or updates were NaN or infinite. They changed no weight, unless it says so."""
