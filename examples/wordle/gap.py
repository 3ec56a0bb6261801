"""Say what ILQL lacks on Wordle: reading the clues, or choosing among the words that fit them.

    python examples/wordle/gap.py [--seed 1] [--steps 1600] [--directory runs/wordle/gap]

The run is that of configs/ilql_wordle.yml on all 431 words. Each step has 64 new games, so `--steps` above 1,600 means
more data as well.

The trained policy plays greedily one game about each word, and sampled two, with several values of beta. Then it plays
again and may say only words that fit all clues so far, as if it read perfectly. The score that it gains by that is what
imperfect reading costs; what is then left to the score of the most telling words is the cost of its choices. At last
its first guess, or the first two, are the most telling words, which shows where the choices cost most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any folder

import numpy as np
import torch

import trlx_like
from examples.play import Respond, Score, play, responder, table
from examples.wordle.__main__ import configured
from examples.wordle.task import DATA_SEED, NO_WORD, WORDS, Bools, Game, Wordle, default_wordle, record
from trlx_like.functional.q_learning import guided_logits

BETAS = (0, 4, 8, 16, 32)


def fitting(wordle: Wordle, text: str) -> Bools:
    """Read a game and say which words fit all its clues. [W]"""
    fits = np.ones(len(wordle.words), dtype=bool)
    lines = text.splitlines()[1:]
    for guess, clue in zip(lines[::2], lines[1::2], strict=True):
        if clue != NO_WORD.strip():
            marks = ["-?!".index(fact[-1]) * 3**place for place, fact in enumerate(clue.split())]
            fits &= wordle.clues[wordle.number[guess]] == sum(marks)
    return fits


def guesses_fit(games: Sequence[Game]) -> list[bool]:
    """Say for each guess of the games, the first ones apart, whether it fits all clues before it."""
    fits = []
    for game in games:
        for turn in range(3, len(game.turns), 2):
            guess = game.wordle.number.get(game.turns[turn].strip())
            fits.append(guess is not None and bool(fitting(game.wordle, "".join(game.turns[:turn]))[guess]))
    return fits


def perfect_reader(trainer: Any, wordle: Wordle, beta: float, sample: bool) -> Respond:
    """Return a player that has the trained policy choose among the words that fit."""

    @torch.no_grad()
    def respond(texts: list[str]) -> list[str]:
        lm, heads = trainer.model.lm, trainer.values
        batch = trainer.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = lm(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        state = out.hidden_states[-1][:, -1]  # [B, H]
        logits = guided_logits(out.logits[:, -1], heads.target_q(state), heads.value(state), beta)[:, : len(WORDS)]
        fits = torch.from_numpy(np.stack([fitting(wordle, text) for text in texts]))
        logits = logits.masked_fill(~fits, -torch.inf)
        chosen = logits.softmax(dim=1).multinomial(1)[:, 0] if sample else logits.argmax(dim=1)
        return [wordle.words[word] for word in chosen.tolist()]

    return respond


def opening_with(guesses: int, wordle: Wordle, respond: Respond) -> Respond:
    """Return a player whose first `guesses` guesses are the most telling words, and the others those of `respond`."""

    @cache
    def most_telling(text: str) -> str:
        return wordle.words[wordle.most_telling(np.flatnonzero(fitting(wordle, text)))]

    def both(texts: list[str]) -> list[str]:
        said = (len(texts[0].splitlines()) - 1) // 2  # guesses so far, which are as many in all games
        return [most_telling(text) for text in texts] if said < guesses else respond(texts)

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of training")
    parser.add_argument("--steps", type=int, default=1600, help="steps of training, of 64 games each")
    parser.add_argument("--directory", type=Path, default=Path("runs/wordle/gap"), help="where the run goes")
    given = parser.parse_args()
    torch.set_num_threads(1)

    places = {"seed": given.seed, "checkpoint_dir": str(given.directory), "resume_from_checkpoint": None}
    config = configured(given.steps).evolve(train=places)
    wordle = default_wordle()
    data = record(wordle, episodes=given.steps * config.train.batch_size, seed=DATA_SEED)
    scores = sorted((game.score for game in data.games), reverse=True)
    for part in (1.0, 0.5, 0.3, 0.1):
        print(f"mean score of the best {part:.0%} of the games: {np.mean(scores[: int(part * len(scores))]):.2f}")
    began = time.process_time()
    trainer = trlx_like.train(config, samples=data.samples, rewards=data.rewards)
    print(f"training: {time.process_time() - began:.0f} CPU seconds, {len(data.games)} games")

    rows = []
    for beta in BETAS:
        for sample in (False, True):
            reader = perfect_reader(trainer, wordle, beta, sample)
            row = [f"beta {beta}, {'sampled' if sample else 'greedy'}"]
            fits = []
            for respond in (
                responder(trainer, {"beta": beta, "do_sample": sample}),
                reader,
                opening_with(1, wordle, reader),
                opening_with(2, wordle, reader),
            ):
                torch.manual_seed(given.seed)
                games = [Game(wordle, hidden) for hidden in range(len(WORDS)) for _ in range(2 if sample else 1)]
                score = Score.of(play(respond, games))
                fits.append(np.mean(guesses_fit(games)))
                row.append(f"{score.mean:.2f} +- {score.error:.2f}")
            row.insert(1, f"{fits[0]:.2f}")
            rows.append(row)
    head = ["", "guesses that fit", "score", "if it read perfectly", "and the best first guess", "and the best two"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
