"""The exceptions a user can meet. Each says which option or argument is wrong, what it was, and what would be right.

They are kinds by who can answer: the user can answer all of these. `exit_code` is what the command line ends with: 2
for a mistake of the user's, another where a program has to tell. Anything else that is raised is our fault and is left
to show its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class TrlxError(Exception):
    """Base of every error that the user can answer."""

    exit_code: ClassVar[int] = 2


class ConfigError(TrlxError):
    """A configuration that cannot run: unknown key, wrong type, impossible value, options that contradict."""


class RegistryError(TrlxError):
    """A name that nothing is registered under, or that is taken; a plugin that cannot be loaded."""


class DataError(TrlxError):
    """Prompts, samples or files that cannot be trained on. Names the row."""


class RewardError(TrlxError):
    """A reward or metric function that raised or returned something that cannot be used."""


class CheckpointError(TrlxError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class SamplerError(TrlxError):
    """What samples is not what learns. The run stopped itself before it learned from that, and is saved as it was."""

    exit_code = 3
