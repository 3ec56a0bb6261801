"""Compare behaviour cloning and ILQL on Wordle with lower and upper bounds.

    python examples/wordle [--seed 1] [--seeds 3] [--problem 0] [--directory runs/wordle]

The configuration is configs/ilql_wordle.yml; cloning is SFT with the same model, data, steps and optimizer. Policies
play `PLAYS` games about each word, sampling at temperature 1 or greedily.

Problem 0 is the whole list of words; in others 330 drawn words are hidden, and the games are drawn anew. On problem 0
with seeds 1, 2 and 3 ILQL scores -2.84, -2.89 and -3.13 at beta 4, and cloning -5.30, -5.29 and -5.32. Greedily, ILQL
scores -2.42, -2.49 and -2.77 at beta 0, and cloning -3.42, -2.96 and -3.23. Standard errors are .04 to .06. Training
takes 81 to 85 CPU seconds (cloning) and 116 to 119 (ILQL).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import numpy as np

from examples import configurations
from examples.play import Episode, Result, cloning, main, play_trained
from examples.problems import Draw
from examples.wordle.task import DATA_SEED, SMART, Game, Wordle, record

BETA = 4
PLAYS = 2


def episodes(wordle: Wordle) -> list[Episode]:
    """Make one game about each word, `PLAYS` times."""
    return [Game(wordle, hidden) for hidden in range(len(wordle.words)) for _ in range(PLAYS)]


def run(draw: Draw) -> list[Result]:
    """Run behaviour cloning and ILQL on the games of one problem."""
    config = configurations.load("ilql_wordle")
    wordle = Wordle.drawn(draw.problem)
    data = record(wordle, seed=draw.problem or DATA_SEED)
    results = []
    cloned = {"BC": {}, "BC, greedy": {"do_sample": False}}
    guided = {
        f"ILQL, beta {beta}{name}": {"beta": beta, **how}
        for beta in (0, BETA)
        for name, how in (("", {}), (", greedy", {"do_sample": False}))
    }
    for name, options, given, ways in (("bc", cloning(config), None, cloned), ("ilql", config, data.rewards, guided)):
        changes = {"seed": draw.seed, "checkpoint_dir": str(draw.directory / name), "resume_from_checkpoint": None}
        games = partial(episodes, wordle)
        results += play_trained(options.evolve(train=changes), data.samples, given, games, ways)
    return results


def bounds(problem: int) -> dict[str, float]:
    """Return mean scores over all words of policies without a network; random ones play ten games per word."""
    wordle, rng = Wordle.drawn(problem), np.random.default_rng(0)
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
    main(__doc__, run, bounds, Path("runs/wordle"), "words and games")
