"""The samples that people get to see: rows of tables for the trackers, with what an algorithm made of each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trlx_like.data import Completion
from trlx_like.rewards.call import Reward
from trlx_like.samplers.text import TextSamples
from trlx_like.tracking import IMAGE, TRAINING
from trlx_like.trainers.scoring import Row

if TYPE_CHECKING:
    from trlx_like.trainers.base import BaseRLTrainer
    from trlx_like.trainers.text import TextTrainer


def log_rows(trainer: BaseRLTrainer[Any], name: str, rows: Sequence[Row], step: int) -> None:
    """Sends rows to the trackers as a table, pictures and what is much the same for all samples behind the rest."""
    if trainer.tracker is None or not rows:
        return
    names = dict.fromkeys(name for row in rows for name in row)
    columns = sorted(names, key=lambda column: column in ("length", "finish_reason", IMAGE))
    trainer.tracker.log_table(name, columns, [[row.get(column) for column in columns] for row in rows], step)


def reward_columns(
    rewards: Sequence[Reward], components: Mapping[str, Sequence[Reward]], place: int
) -> dict[str, float | None]:
    """A sample's reward and what it is made of, each a number: of rewards of tokens the sum."""
    columns = {"reward": rewards, **{f"reward/{name}": column for name, column in components.items()}}
    found = {name: column[place] for name, column in columns.items()}
    return {name: sum(reward) if isinstance(reward, list) else reward for name, reward in found.items()}


class ShownSamples:
    """The main process's first samples of a round: to `train.log_samples` prompts, with all responses to each.

    None are taken where those of another round were shown less than `train.log_samples_interval` steps ago.

    group_size: responses to a prompt, which follow each other; None: those to the same prompt, wherever they are. Of
    more than one the rows say which group they are in.
    """

    def __init__(self, trainer: TextTrainer[Any], group_size: int | None = 1) -> None:
        self.trainer = trainer
        self.group_size = group_size
        train, progress = trainer.config.train, trainer.progress
        recent = progress.shown is not None and progress.step - progress.shown < train.log_samples_interval
        self.is_due = trainer.tracker is not None and not recent
        self.prompts = train.log_samples if self.is_due and trainer.world.main else 0
        self.rows: list[Row] = []
        self.completions: list[Completion] = []  # of the rows, on the CPU
        self._groups: dict[Hashable, int] = {}
        self._seen = 0

    def add(self, samples: TextSamples, rewards: Sequence[Reward]) -> None:
        """The next samples of the round, of which those are kept that are to be shown."""
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
        """Sends the rows to the trackers with further columns, of which the first cells are those of the rows.

        They are of the step that is made next, as the metrics of the round are.
        """
        for name, cells in columns.items():
            for row, cell in zip(self.rows, cells, strict=False):
                row[name] = cell
        progress = self.trainer.progress
        log_rows(self.trainer, TRAINING, self.rows, progress.step + 1)
        if self.is_due:
            progress.shown = progress.step

    def _shown(self, samples: TextSamples) -> Iterator[tuple[int, int]]:
        """Places of the samples to be shown, and the number of their group."""
        for place, prompt in enumerate(samples.prompts):
            key: Hashable = prompt if self.group_size is None else self._seen // self.group_size
            self._seen += 1
            if key in self._groups or len(self._groups) < self.prompts:
                yield place, self._groups.setdefault(key, len(self._groups))


def spread(values: Iterable[float], kept: Iterable[bool]) -> Iterator[float | None]:
    """The values at the places that are kept, None at the others."""
    remaining = iter(values)
    return (next(remaining) if keep else None for keep in kept)
