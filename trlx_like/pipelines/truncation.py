"""Counting the tokens that are lost when data is longer than allowed, for one warning and for metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Count the tokens of one row that were cut."""

    prompt: int = 0
    output: int = 0


@dataclass
class Truncation:
    """Add up the tokens that were cut and the rows that were dropped, over all rows of some data."""

    rows: int  # of the data
    cut: int  # rows that have lost tokens
    prompt_tokens: int
    outputs: int  # rows whose output has lost tokens
    output_tokens: int
    dropped: int  # rows that were left out because they are too long

    @classmethod
    def of(cls, losses: Iterable[Lost], rows: int | None = None) -> Truncation:
        """Add up the losses of single rows.

        Args:
            losses: One entry per row that was kept.
            rows: The number of rows of the data; None: all were kept.
        """
        kept = list(losses)
        rows = len(kept) if rows is None else rows
        return cls(
            rows=rows,
            cut=sum(any(lost) for lost in kept),
            prompt_tokens=sum(lost.prompt for lost in kept),
            outputs=sum(lost.output > 0 for lost in kept),
            output_tokens=sum(lost.output for lost in kept),
            dropped=rows - len(kept),
        )

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
