"""The exceptions that a user can correct. Each names the option or argument, its value, and what would be right.

`exit_code` is the exit code of the command line: 2 for a mistake of the user, another number if a calling program has
to tell the case apart. Any other exception is an error in this library, and shows its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class TrlxError(Exception):
    """Base class of every error that the user can correct."""

    exit_code: ClassVar[int] = 2


class ConfigError(TrlxError):
    """A configuration that cannot run: an unknown key, a wrong type, an impossible value, contradictory options."""


class RegistryError(TrlxError):
    """A name that is not registered, or already taken, or a plugin that cannot be loaded."""


class DataError(TrlxError):
    """Prompts, samples or files that cannot be trained on; the message names the row."""


class RewardError(TrlxError):
    """A reward or metric function that raised an exception or returned something unusable."""


class CheckpointError(TrlxError):
    """A checkpoint that is missing, damaged, or of another run."""


class SamplerError(TrlxError):
    """A sampler whose log-probabilities differ from the learner's. The run stopped before learning, and is saved."""

    exit_code = 3
