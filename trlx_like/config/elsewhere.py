"""What other libraries call options and arguments that have another name here, for the error about an unknown one.

Nothing takes these names: they are looked up after one was refused. The tables are in `elsewhere.yml`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from trlx_like.config.yaml_source import packaged
from trlx_like.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
TABLES = "config/elsewhere.yml"


@cache
def answers(kind: str) -> Mapping[str, str]:
    """Return one table: name in another library -> the words of the error about it.

    Args:
        kind: `options`, `arguments`, `methods`, `hooks`, `generation`, `trl` or `trlx`.
    """
    return {name: words for words, names in packaged(TABLES)[kind].items() for name in names.split()}


def named_elsewhere(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function answer an argument of another library, and an option, with its place and not with a TypeError."""
    known = set(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in (name for name in kwargs if name not in known):
            if words := answers("arguments").get(name) or answers("options").get(name) or _place(name):
                raise ConfigError(f"{function.__name__} takes no {name}. Here this is {words}.")
        return function(*args, **kwargs)

    return call


def _place(name: str) -> str | None:
    """Return the place of a section or an option in the configuration."""
    from trlx_like.config import METHODS, TRLConfig  # they import this module

    sections = TRLConfig.sections()
    if name in sections:
        return f"a section of config=, as in config.evolve({name}={{...}})"
    methods = (("method", METHODS.get(method)) for method in METHODS.names())
    places = (f"{section}.{name}" for section, kind in [*sections.items(), *methods] if name in kind.model_fields)
    return next((f"the option {place} of config=" for place in places), None)
