"""The TensorBoard tracker: scalars, tables and the configuration as text, and the pictures of a table as one image."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trlx_like.tracking.base import RunInfo, Tracker, optional_package, started
from trlx_like.tracking.pictures import table_grid
from trlx_like.tracking.values import compact, plain


class TensorboardTracker(Tracker):
    """Write an event file to `train.logging_dir`, or to `tensorboard/` in the run folder.

    A resumed run hides what the interrupted one wrote after the step that it continues from.
    """

    def __init__(self, run: RunInfo) -> None:
        with optional_package("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        directory = Path(run.logging_dir or run.directory / "tensorboard")
        purge = None if run.resume_step is None else run.resume_step + 1
        # Any: its methods have no types.
        self._writer: Any = started("tensorboard", SummaryWriter, run, log_dir=str(directory), purge_step=purge)
        text = yaml.safe_dump(plain(run.config), sort_keys=False, allow_unicode=True)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), run.resume_step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)
        if (pictures := table_grid(columns, rows)) is not None:
            self._writer.add_image(name, np.asarray(pictures), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """Return a cell of a Markdown table, with HTML, bars and line ends escaped."""
    value = plain(value)
    text = compact(value) if isinstance(value, float) else str(value)
    text = html.escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("\r\n", "\n").replace("\n", "<br>")
