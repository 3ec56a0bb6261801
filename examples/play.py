"""What the games have in common: a policy of texts that plays episodes over many turns, and a table of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Respond = Callable[[list[str]], list[str]]
"""What is said next, for each text so far."""


class Episode(Protocol):
    """One game that is being played."""

    text: str
    """Everything that has been said so far: the prompt of the next turn."""
    score: float
    """Sum of the rewards so far."""
    over: bool

    def say(self, words: str) -> None:
        """Takes a turn: `words` and the game's answer go to the text, the reward to the score."""
        ...


def play(respond: Respond, episodes: Sequence[Episode]) -> list[float]:
    """Plays all episodes to their ends, side by side, and returns their scores."""
    while running := [episode for episode in episodes if not episode.over]:
        for episode, words in zip(running, respond([episode.text for episode in running]), strict=True):
            episode.say(words)
    return [episode.score for episode in episodes]


def responder(trainer: Any, batch_size: int = 128, **gen_kwargs: Any) -> Respond:
    """A trained policy as it plays: `trainer.generate_eval` under its generation options, changed by `gen_kwargs`."""

    def respond(texts: list[str]) -> list[str]:
        said: list[str] = []
        for start in range(0, len(texts), batch_size):
            said += trainer.decode(trainer.generate_eval(texts[start : start + batch_size], **gen_kwargs))
        return said

    return respond


@dataclass
class Score:
    """Mean score of a policy over its episodes, and the standard error of that mean."""

    mean: float
    error: float
    episodes: int

    @classmethod
    def of(cls, scores: Iterable[float]) -> Score:
        values = list(scores)
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
        return cls(mean, (variance / len(values)) ** 0.5, len(values))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines with columns of even width: the first to the left, the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
