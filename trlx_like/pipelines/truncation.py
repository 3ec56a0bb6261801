"""Counting the tokens that are lost when data is longer than allowed, for one warning and for metrics."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from trlx_like.data.flat import FlatRows

logger = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Count the tokens of one row that were cut."""

    prompt: int = 0
    output: int = 0


class Truncation:
    """Add up the tokens that were cut and the rows that were dropped, over all rows of some data.

    Args:
        kept: The rows that were kept, each with its `lost` tokens.
        rows: The number of rows of the data; None: all were kept.
    """

    def __init__(self, kept: FlatRows[Any], rows: int | None = None) -> None:
        self.rows = len(kept) if rows is None else rows
        self.dropped = self.rows - len(kept)  # rows that were left out because they are too long
        losses = kept.values("lost")  # the numbers of `Lost` for each row that has lost tokens [2 K]
        prompts, outputs = losses[::2], losses[1::2]
        self.cut, self.outputs = len(prompts), int((outputs > 0).sum())  # rows, and those whose output is cut
        self.prompt_tokens, self.output_tokens = int(prompts.sum()), int(outputs.sum())

    def warn(self, name: str, limit: str) -> None:
        """Log a warning if anything is lost.

        Args:
            name: What the rows are, such as "samples".
            limit: The limit that was exceeded, with its value.
        """
        if self.dropped:
            text = "%d of %d %s are longer than %s and were dropped."
            logger.warning(text, self.dropped, self.rows, name, limit)
        if self.cut:
            parts = [f"{self.prompt_tokens} tokens of prompts"] if self.prompt_tokens else []
            parts += [f"{self.output_tokens} tokens of {self.outputs} outputs"] if self.outputs else []
            text = "%d of %d %s are longer than %s and were cut: %s are lost."
            logger.warning(text, self.cut, self.rows, name, limit, " and ".join(parts))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run about its data, or none if nothing is lost."""
        if not (self.cut or self.dropped):
            return {}
        return {
            "data/cut_rows": float(self.cut),
            "data/cut_outputs": float(self.outputs),
            "data/cut_output_tokens": float(self.output_tokens),
            "data/dropped_rows": float(self.dropped),
        }
