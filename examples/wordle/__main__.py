"""Compare behaviour cloning and ILQL on Wordle with lower and upper bounds.

    python examples/wordle [--seed 1] [--seeds 3] [--problem 0] [--directory runs/wordle] [--words 40] [--steps 400]

The configuration is configs/ilql_wordle.yml; cloning is SFT with the same model, data, steps and optimizer. Policies
play `PLAYS` games about each word, sampling at temperature 1 or greedily.

Problem 0 is the whole list of words; in others 330 drawn words are hidden, and the games are drawn anew. On problem 0
with seeds 1, 2 and 3 ILQL scores -2.84, -2.89 and -3.13 at beta 4, and cloning -5.30, -5.29 and -5.32. Greedily, ILQL
scores -2.42, -2.49 and -2.77 at beta 0, and cloning -3.42, -2.96 and -3.23. Standard errors are .04 to .06. Training
takes 81 to 85 CPU seconds (cloning) and 116 to 119 (ILQL).

With `--words` the problem is a short list, such as 40 words, whose best score is known exactly up to 100 words, and
`python -m examples.diagnose wordle` says where a run on it loses. Each step has 64 new games, so `--steps` is how much
data there is as well.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import numpy as np

from examples import configurations
from examples.play import Episode, Result, cloning, game_parser, main, play_trained
from examples.problems import Draw
from examples.wordle.exact import MOST_WORDS, Sets
from examples.wordle.task import DATA_SEED, SMART, TRIES, Game, Wordle, record
from trlx_like import TRLConfig

BETA = 4
PLAYS = 2


def episodes(wordle: Wordle) -> list[Episode]:
    """Make one game about each word, `PLAYS` times."""
    return [Game(wordle, hidden) for hidden in range(len(wordle.words)) for _ in range(PLAYS)]


def configured(steps: int) -> TRLConfig:
    """Return the configuration with another number of steps."""
    changes = {"total_steps": steps, "eval_interval": steps, "checkpoint_interval": steps}
    return configurations.load("ilql_wordle").evolve(train=changes, scheduler={"kwargs": {"total_iters": steps}})


def run(draw: Draw, words: int | None, steps: int) -> list[Result]:
    """Run behaviour cloning and ILQL on the games of one problem."""
    config = configured(steps)
    wordle = Wordle.drawn(draw.problem, words)
    data = record(wordle, episodes=steps * config.train.batch_size, seed=draw.problem or DATA_SEED)
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


def bounds(problem: int, words: int | None) -> dict[str, float]:
    """Return mean scores over all words of policies without a network; random ones play ten games per word."""
    wordle, rng = Wordle.drawn(problem, words), np.random.default_rng(0)
    hidden = np.tile(np.arange(len(wordle.words)), 10)

    def score(smart: float) -> float:
        games = wordle.play_randomly(hidden, smart, rng)
        return float(np.mean([wordle.score(guesses, word) for guesses, word in zip(games, hidden, strict=True)]))

    best = {"the best play": float(Sets(wordle).best()[1][TRIES, 0])} if len(wordle.words) <= MOST_WORDS else {}
    return {
        "any word": score(0),
        "data": score(SMART),
        "any word that fits": score(1),
        "the most telling word that fits": wordle.informed_score(),
        **best,
    }


if __name__ == "__main__":
    parser = game_parser(__doc__, Path("runs/wordle"), "words and games")
    parser.add_argument(
        "--words", type=int, help="number of words that are drawn (default: 431 for problem 0, else 330)"
    )
    parser.add_argument("--steps", type=int, default=1600, help="steps of training, of 64 new games each")
    given = parser.parse_args()
    main(given, partial(run, words=given.words, steps=given.steps), partial(bounds, words=given.words))
