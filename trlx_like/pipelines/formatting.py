"""Applies a user's `formatting_func` to samples, one by one or, as functions for TRL 0.7 expect, in batches of columns.

Which of the two a function expects is told from its results: a function of batches returns one text per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from trlx_like.errors import DataError
from trlx_like.pipelines.lines import JsonLines, compact

BATCH = 1000
"""Rows in a batch for a function of batches."""


def formatted(samples: Sequence[Any], function: Callable[[Any], Any]) -> Sequence[Any]:
    """Make the samples to train on.

    Args:
        samples: The rows of the user.
        function: Returns a sample for a row, or a list of texts for a batch: a dict with a list for each column.

    Raises:
        DataError: If a function of batches returns another number of texts than there are rows.
    """
    rows = samples if isinstance(samples, JsonLines) else list(samples)
    if not rows:
        return rows
    try:
        first = function(rows[0])
    except Exception as error:  # a function of batches that gets a row may fail in any way
        if not _takes_batches(function, rows[0]):
            error.add_note(f"method.formatting_func got samples[0], a {type(rows[0]).__name__}: {rows[0]!r:.200}")
            raise
    else:
        if not (isinstance(first, list) and _takes_batches(function, rows[0])):
            return compact(chain([first], map(function, islice(rows, 1, None))))
    texts: list[Any] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        made = function(_columns(batch, start))
        if len(made) != len(batch):
            raise DataError(
                f"method.formatting_func returned {len(made)} texts for {len(batch)} samples; it must return one per "
                "sample, or take a single sample and return a string."
            )
        texts += made
    return texts


def _takes_batches(function: Callable[[Any], Any], row: Any) -> bool:
    """Tell whether a function that returned a list for a row, or failed, returns one text per row of a batch.

    Three equal rows decide: a dialogue, the list that a function of rows may return, has an even number of turns.
    """
    if not isinstance(row, Mapping):
        return False
    try:
        made = function({name: [value] * 3 for name, value in row.items()})
    except Exception:  # a function of rows may do anything with columns
        return False
    return isinstance(made, list) and len(made) == 3 and all(isinstance(text, str) for text in made)


def _columns(rows: Sequence[Mapping[str, Any]], start: int) -> dict[str, list[Any]]:
    """Turn rows into columns. Raise DataError if a row lacks one."""
    for number, row in enumerate(rows, start):
        if row.keys() != rows[0].keys():
            raise DataError(
                f"samples[{number}] has the keys {sorted(row)} and samples[{start}] has {sorted(rows[0])}; "
                "method.formatting_func takes batches, which need the same keys in every row."
            )
    return {name: [row[name] for row in rows] for name in rows[0]}
