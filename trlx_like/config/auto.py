"""The value `auto` of options that follow from the model or the data: the type of such options, and their rules.

A trainer puts numbers in their place before it does anything else, see `trainers/settling.py`, so that the rest of the
run, its folder and its checkpoints know numbers only. The learning rate has a rule of its own in `optim.py`, since it
needs the loaded model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, WrapValidator

from trlx_like.config.problems import Accepts

AUTO: Any = "auto"  # the value of options that are numbers everywhere else
MOST_TOKENS = 1024
"""Largest `train.seq_length` that `auto` stands for."""
POOL_GROWTH = 512
"""Number of responses that the pool of RFT grows by with `auto`, as far as the bounds of a prompt allow."""
FEWEST, MOST = 4, 32
"""Bounds of the number of responses to a prompt that `auto` stands for."""


def _kept(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if is_auto(value) else check(value)


def is_auto(value: object) -> bool:
    """Return whether the value of an option is `auto`."""
    return isinstance(value, str) and value == AUTO


CountOrAuto = Annotated[
    int,  # in every trainer; in a configuration that is not yet settled it may be the text "auto"
    Field(ge=1),
    WrapValidator(_kept),
    Accepts("a whole number of at least 1", "auto"),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": AUTO}]}),
]


def context_for(positions: int | None) -> int:
    """Return the tokens of a prompt and its response together: the positions of the model, at most 1024.

    Args:
        positions: Number of positions of the model; None: not known, or without a limit.
    """
    return MOST_TOKENS if positions is None else min(positions, MOST_TOKENS)


def responses_for(prompts: int | None) -> int:
    """Return the responses to each prompt by which RFT's pool grows: 512 over the number of prompts, from 4 to 32.

    Every prompt is sampled for, so a fixed number makes the time before the first step grow with the data.

    Args:
        prompts: Number of prompts; None: not known.
    """
    return MOST if not prompts else min(max(POOL_GROWTH // prompts, FEWEST), MOST)
