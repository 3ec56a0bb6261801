"""The samples of a round that people get to see: rows of a table, with what the algorithm made of each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from trlx_like.data import Completion
from trlx_like.rewards.call import Reward
from trlx_like.samplers.text import TextSamples
from trlx_like.tracking import TRAINING
from trlx_like.trainers.context import Row, Run
from trlx_like.trainers.scoring import reward_columns


class ShownSamples:
    """Keep the main process's first samples of a round: the responses to the first `train.log_samples` prompts.

    Nothing is kept if the samples of another round were shown less than `train.log_samples_interval` steps ago.

    Args:
        run: the run.
        group_size: how many consecutive responses belong to one prompt; None: responses to the same prompt may be
            anywhere in the round. Unless it is 1, the rows say which group they are in.
    """

    def __init__(self, run: Run, group_size: int | None = 1) -> None:
        self.run = run
        self.group_size = group_size
        train, progress = run.config.train, run.progress
        recent = progress.shown is not None and progress.step - progress.shown < train.log_samples_interval
        self.is_due = run.tracker is not None and not recent
        self.prompts = train.log_samples if self.is_due and run.world.main else 0
        self.rows: list[Row] = []
        self.completions: list[Completion] = []  # of the rows, on the CPU
        self._groups: dict[Hashable, int] = {}
        self._seen = 0

    def add(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        """Take the next samples of the round, and keep those that will be shown."""
        if not self.prompts or (self.group_size is not None and len(self._groups) == self.prompts):
            return
        shown = dict(self._shown(samples))
        self.completions += samples.completion[list(shown)].to("cpu").split() if shown else []
        lengths = samples.completion.mask.sum(dim=1).tolist()
        for place, group in shown.items():
            row: Row = {} if self.group_size == 1 else {"group": group}
            row |= {"prompt": samples.prompts[place], "output": samples.outputs[place]}
            row |= reward_columns(rewards, samples.components, place)
            self.rows.append({**row, "length": lengths[place], "finish_reason": samples.finish_reasons[place]})

    def log(self, **columns: Iterable[Any]) -> None:
        """Send the rows to the trackers with further columns, under the step that comes next.

        Args:
            columns: one cell for each sample of the round, in order; cells beyond the rows that are shown are ignored.
        """
        for name, cells in columns.items():
            for row, cell in zip(self.rows, cells, strict=False):
                row[name] = cell
        progress = self.run.progress
        self.run.log_table(TRAINING, self.rows, progress.step + 1)
        if self.is_due:
            progress.shown = progress.step

    def _shown(self, samples: TextSamples) -> Iterator[tuple[int, int]]:
        """Find the places of the samples that will be shown, and the numbers of their groups."""
        for place, prompt in enumerate(samples.prompts):
            key: Hashable = prompt if self.group_size is None else self._seen // self.group_size
            self._seen += 1
            if key in self._groups or len(self._groups) < self.prompts:
                yield place, self._groups.setdefault(key, len(self._groups))


def spread(values: Iterable[float], kept: Iterable[bool]) -> Iterator[float | None]:
    """Put the values at the places that are kept, and None at the others."""
    remaining = iter(values)
    return (next(remaining) if keep else None for keep in kept)
