"""Shared by the games: a text policy that plays episodes of many turns, and a table of results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import trlx_like
from examples.problems import Draw, add_options, draws, summary
from trlx_like import TRLConfig

Respond = Callable[[list[str]], list[str]]
"""Maps the texts so far to the next turn of each."""


class Episode(Protocol):
    """A game in progress."""

    over: bool

    @property
    def text(self) -> str:
        """All text so far, which is the prompt of the next turn."""
        ...

    @property
    def score(self) -> float:
        """Sum of the rewards so far."""
        ...

    def say(self, words: str) -> None:
        """Take a turn: append `words` and the game's answer to the text, and add the reward to the score."""
        ...


def play(respond: Respond, episodes: Sequence[Episode]) -> list[float]:
    """Play all episodes to their end, in parallel, and return their scores."""
    while running := [episode for episode in episodes if not episode.over]:
        for episode, words in zip(running, respond([episode.text for episode in running]), strict=True):
            episode.say(words)
    return [episode.score for episode in episodes]


def responder(trainer: Any, gen_kwargs: Mapping[str, Any], batch_size: int = 128) -> Respond:
    """Return the function by which a trained policy plays: `generate_eval` with `gen_kwargs` over its options."""

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
    """Format rows with columns of equal width, the first aligned left and the others right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


@dataclass
class Result:
    """Hold the scores of a policy, and the CPU seconds of its training and playing."""

    name: str
    score: Score
    training: float
    playing: float


def cloning(config: TRLConfig) -> TRLConfig:
    """Return the same run as behaviour cloning: SFT with the same model, optimizer, steps and batches."""
    values = config.to_dict()
    options = {name: value for name, value in values["method"]["gen_kwargs"].items() if name != "beta"}
    values["method"] = {"name": "SFTConfig", "gen_kwargs": options}
    values["train"]["trainer"] = "SFTTrainer"
    values["data"]["rewards"] = None
    return TRLConfig.from_dict(values)


def play_trained(
    config: TRLConfig,
    samples: Sequence[Any],
    rewards: Sequence[Any] | None,
    episodes: Callable[[], list[Episode]],
    ways: Mapping[str, Mapping[str, Any]],
    **data: Any,
) -> list[Result]:
    """Train, then play `episodes()` in each of the named `ways`, which are changes of the generation options.

    Scores vary with `config.train.seed`. data: further arguments of `trlx_like.train`.
    """
    began = time.process_time()
    trainer = trlx_like.train(config, samples=samples, rewards=rewards, **data)
    training = time.process_time() - began
    results = []
    for name, options in ways.items():
        began = time.process_time()
        torch.manual_seed(config.train.seed)
        score = Score.of(play(responder(trainer, options), episodes()))
        results.append(Result(name, score, training, time.process_time() - began))
    return results


def game_parser(doc: str | None, directory: Path, problem: str) -> argparse.ArgumentParser:
    """Make the parser of a game's program. The arguments are those of `examples.problems.add_options`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1, directory, problem)
    return parser


def main(
    given: argparse.Namespace, run: Callable[[Draw], list[Result]], bounds: Callable[[int], dict[str, float]]
) -> None:
    """Run `--seeds` times, one after the other on one thread, and print a table beside the bounds."""
    torch.set_num_threads(1)
    drawn = draws(given)
    runs = [run(draw) for draw in drawn]
    known = {problem: bounds(problem) for problem in sorted({draw.problem for draw in drawn})}
    limits = {name: [known[draw.problem][name] for draw in drawn] for name in known[drawn[0].problem]}
    rows = [[name, *(f"{value:.2f}" for value in values), "", "", ""] for name, values in limits.items()]
    for results in zip(*runs, strict=True):
        scores = [f"{result.score.mean:.2f} +- {result.score.error:.2f}" for result in results]
        seconds = [sum(values) / len(runs) for values in zip(*((r.training, r.playing) for r in results), strict=True)]
        middle = summary(drawn, [result.score.mean for result in results], 2)
        rows.append([results[0].name, *scores, middle, *(f"{value:.0f}" for value in seconds)])
    rows.sort(key=lambda row: float(row[1].split()[0]))
    print(
        "\n"
        + table(["mean score", *(f"problem {draw.problem}" for draw in drawn), "", "CPU s training", "playing"], rows)
    )
    print(f"\nrun folders: {given.directory}")
