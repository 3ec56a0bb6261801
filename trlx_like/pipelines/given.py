"""The data arguments of `train`: each as a list of rows, from the caller or the section `data`, and what they imply."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trlx_like.config import DataConfig
from trlx_like.data.flat import View
from trlx_like.errors import ConfigError
from trlx_like.pipelines.forms import paired, reward_of
from trlx_like.pipelines.lines import JsonLines
from trlx_like.pipelines.sources import load_rows
from trlx_like.pipelines.tables import divided, held_out, listed, renamed

ROWS = (list, JsonLines)
"""What rows are once they are read. Anything else is a function, or a mapping of several sets."""


def read_arguments(data: Mapping[str, Any], options: DataConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return every data argument as a list of rows.

    A `DatasetDict` is divided into rows to train on and rows to evaluate on. Functions and mappings stay as they are.

    Args:
        data: The arguments that were passed, by name.
        options: The section `data`, which names the sources of arguments that were not passed.
        names: The names of all data arguments, each before its `eval_` counterpart or after it.

    Raises:
        TrlxError: A source cannot be read, or a row lacks a column of `data.columns`.
    """
    found = dict(data)
    for name in names:
        spec = getattr(options, name, None)
        if found.get(name) is None and spec is not None:
            found[name] = load_rows(spec, f"data.{name}", options.columns)
    for name in [name for name in names if data.get(name) is not None]:
        rows, rest = (data[name], None) if name.startswith("eval_") else divided(data[name])
        parts = {name: rows}
        if rest is not None and found.get(f"eval_{name}") is None:
            parts[f"eval_{name}"] = rest
        for key, value in parts.items():
            value = listed(value, key)
            found[key] = renamed(value, options.columns, key) if isinstance(value, ROWS) else value
    return found


def shaped(data: Mapping[str, Any], options: DataConfig, uses: Collection[str]) -> dict[str, Any]:
    """Complete data by what its tables hold: rewards beside samples, pairs of labelled answers, and held-out rows.

    Args:
        data: The rows by argument.
        options: The section `data`.
        uses: The arguments that the trainer accepts.

    Raises:
        ConfigError: `data.eval_split` cannot be used with the trainer or the data.
    """
    found = dict(data)
    for name in ("preferences", "eval_preferences"):
        if isinstance(found.get(name), ROWS):
            found[name] = paired(found[name], name)
    if options.eval_split is not None:
        _hold_out(found, options.eval_split, uses)
    if "rewards" in uses and found.get("rewards") is None and isinstance(found.get("samples"), ROWS):
        rewards = View(found["samples"], reward_of)
        found["rewards"] = rewards if any(reward is not None for reward in rewards) else None
    return found


def _hold_out(found: dict[str, Any], fraction: float, uses: Collection[str]) -> None:
    """Move a fraction of the rows that are trained on to those that are evaluated on, as `data.eval_split` says."""
    splits = [name for name in ("samples", "preferences", "prompts") if {name, f"eval_{name}"} <= {*uses}]
    if not splits:
        raise ConfigError(f"data.eval_split ({fraction:g}) needs a trainer that evaluates on held-out rows.")
    name = splits[0]
    rows = found.get(name) or []  # `check` does not read every source
    if found.get(f"eval_{name}") is not None or not isinstance(rows, ROWS) or len(rows) == 1:
        raise ConfigError(
            f"data.eval_split ({fraction:g}) needs a list of two {name} at least, and no eval_{name} beside it."
        )
    if rows:
        found[name], found[f"eval_{name}"] = held_out(rows, fraction)
