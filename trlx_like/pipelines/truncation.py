"""What is lost where data is longer than it may be: counted row by row, said in one line, and logged as metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Lost(NamedTuple):
    """Tokens of a row that were cut."""

    prompt: int = 0  # of what the model answers
    output: int = 0  # of what it is to say


@dataclass
class Truncation:
    """Over all rows of some data."""

    rows: int  # in all
    cut: int  # of which something is lost
    prompt_tokens: int
    outputs: int  # rows whose answer has lost something
    output_tokens: int
    dropped: int  # rows that were left out because they are too long

    @classmethod
    def of(cls, losses: Iterable[Lost], rows: int | None = None) -> Truncation:
        """rows: how many there were; None: as many as `losses`, those of the rows that were kept."""
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
        """Says what is lost, if something is. limit: which limit there is, and its value."""
        if self.dropped:
            text = "%d of %d %s are longer than %s and were dropped."
            logger.warning(text, self.dropped, self.rows, name, limit)
        if self.cut:
            parts = [f"{self.prompt_tokens} tokens of prompts"] if self.prompt_tokens else []
            parts += [f"{self.output_tokens} tokens of {self.outputs} outputs"] if self.outputs else []
            text = "%d of %d %s are longer than %s and were cut: %s are lost."
            logger.warning(text, self.cut, self.rows, name, limit, " and ".join(parts))

    def metrics(self) -> dict[str, float]:
        """For the log of a run; none where nothing is lost."""
        if not (self.cut or self.dropped):
            return {}
        return {
            "data/cut_rows": float(self.cut),
            "data/cut_outputs": float(self.outputs),
            "data/cut_output_tokens": float(self.output_tokens),
            "data/dropped_rows": float(self.dropped),
        }
