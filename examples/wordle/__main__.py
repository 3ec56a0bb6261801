"""Behaviour cloning and ILQL on Wordle, beside what bounds them.

    python -m examples.wordle [--seed 1] [--seeds 3] [--directory runs/wordle]

The configuration is configs/ilql_wordle.yml; cloning is SFT with the same model, data, steps and optimizer. Policies
play one game about each word, sampling at temperature 1.

These few minutes are too short for this task. A run of 1800 steps (170 CPU seconds, 1.4 passes) knows the words and
hardly reads the clues: -5.84 at beta 0 and -5.68 at beta 16, standard error .05, where the data has -4.06. The
benchmark trains a pretrained GPT-2 on a million games.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import trlx_like
from examples.play import Episode, Result, cloning, main, play_trained
from examples.wordle.task import SMART, Game, default_data, default_wordle

CONFIG = Path(__file__).parents[2] / "configs" / "ilql_wordle.yml"
BETAS = [0, 4, 16, 64]


def episodes() -> list[Episode]:
    """One about each word."""
    wordle = default_wordle()
    return [Game(wordle, hidden) for hidden in range(len(wordle.words))]


def run(seed: int, directory: Path) -> list[Result]:
    """BC and ILQL under one seed."""
    config = trlx_like.TRLConfig.load_yaml(CONFIG)
    data = default_data()
    results = []
    for name, options, given, betas in (("BC", cloning(config), None, []), ("ILQL", config, data.rewards, BETAS)):
        changes = {"seed": seed, "checkpoint_dir": str(directory / name.lower()), "resume_from_checkpoint": None}
        results += play_trained(name, options.evolve(train=changes), data.samples, given, episodes, betas)
    return results


def bounds() -> dict[str, float]:
    """Mean scores over all words of policies that need no network: ten games a word where they draw lots."""
    wordle, rng = default_wordle(), np.random.default_rng(0)
    hidden = np.tile(np.arange(len(wordle.words)), 10)

    def score(smart: float) -> float:
        games = wordle.play_randomly(hidden, smart, rng)
        return float(np.mean([wordle.score(guesses, word) for guesses, word in zip(games, hidden, strict=True)]))

    return {
        "any word": score(0),
        "data": score(SMART),
        "any word that fits": score(1),
        "the most telling word that fits": wordle.informed_score(),
    }


if __name__ == "__main__":
    main(__doc__, run, bounds, Path("runs/wordle"))
