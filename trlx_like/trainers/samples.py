"""The table of a round's first samples, with their advantages and other numbers of the algorithm."""

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
    """Collect the main process's responses to the first `train.log_samples` prompts of a round, to log them.

    Nothing is collected if samples were logged less than `train.log_samples_interval` steps ago.

    Args:
        run: The run.
        group_size: How many consecutive responses belong to one prompt. None: responses to the same prompt may be
            anywhere in the round. Unless it is 1, the table has a column with the number of the group.
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

    def add(self, samples: TextSamples, rewards: Sequence[Reward] | None) -> None:
        """Add the next samples of the round, and their rewards if they have some; only the first prompts' are kept."""
        if not self.prompts or (self.group_size is not None and len(self._groups) == self.prompts):
            return
        shown = dict(self._shown(samples))
        self.completions += samples.completion[list(shown)].to("cpu").split() if shown else []
        lengths = samples.completion.mask.sum(dim=1).tolist()
        for place, group in shown.items():
            row: Row = {} if self.group_size == 1 else {"group": group}
            row |= {"prompt": samples.prompts[place], "output": samples.outputs[place]}
            row |= {} if rewards is None else reward_columns(rewards, samples.components, place)
            self.rows.append({**row, "length": lengths[place], "finish_reason": samples.finish_reasons[place]})

    def log(self, **columns: Iterable[Any]) -> None:
        """Log the collected samples with further columns, under the step that comes next.

        Args:
            columns: Values for the samples of the round, in order; values beyond the collected samples are ignored.
        """
        for name, cells in columns.items():
            for row, cell in zip(self.rows, cells, strict=False):
                row[name] = cell
        progress = self.run.progress
        self.run.log_table(TRAINING, self.rows, progress.step + 1)
        if self.is_due:
            progress.shown = progress.step

    def _shown(self, samples: TextSamples) -> Iterator[tuple[int, int]]:
        """Yield the place of each sample that will be logged, and the number of its group."""
        for place, prompt in enumerate(samples.prompts):
            key: Hashable = prompt if self.group_size is None else self._seen // self.group_size
            self._seen += 1
            if key in self._groups or len(self._groups) < self.prompts:
                yield place, self._groups.setdefault(key, len(self._groups))


def spread(values: Iterable[float], kept: Iterable[bool]) -> Iterator[float | None]:
    """Yield the next value for each True in `kept`, and None for each False."""
    remaining = iter(values)
    return (next(remaining) if keep else None for keep in kept)
