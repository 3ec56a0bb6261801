"""Say at which guesses a run of ILQL on a small Wordle loses its score, and compare its V and Q with exact ones.

A guess is one token, so values are compared token by token. The model plays one game about each word and says the
likeliest token. What its score misses to the best score is the sum of the regrets of its guesses over the games, each
guess weighed with the best play after it; the first table divides it by guess and by mistake. A word that contradicts
the clues costs nothing if it tells the others apart as well as the best word does.

Then V and Q are compared with the fixed point of ILQL's losses, with infinite data, no network and no conservative
loss, at each guess of `GAMES` games of the data's player that the model was not trained on. The advantage of a word is
Q - V.
"""

from __future__ import annotations

import argparse

import numpy as np

import trlx_like
from examples import configurations
from examples.play import play, table
from examples.values import Floats, Panel, Reader, correlation, model_folder
from examples.wordle.__main__ import BETA
from examples.wordle.exact import Sets, greedy, imitation
from examples.wordle.gap import fitting
from examples.wordle.task import TRIES, WORDS, Game, Wordle, record, tokenizer

GAMES = 1000
UNSEEN_SEED = 90000  # added to the problem: games that no run is trained on
DRAWN = 300  # points in a panel of the picture
MISTAKES = ("no word of the list", "contradicts the clues", "fits, but tells less")


def losses(sets: Sets, wordle: Wordle, games: list[Game]) -> tuple[Floats, Floats]:
    """Compute what finished games lose to the best play, by guess and mistake.

    Args:
        sets: The sets of words of the list.
        wordle: The list.
        games: One game about each word, or several about each.

    Returns:
        The number of guesses of each kind [TRIES, 3] that lose something, and the sum of regrets [TRIES, 3]; both per
        game. Over all games of one policy without randomness, the best score less theirs is the sum of the regrets.
    """
    best_q, best_v = sets.best()
    count, lost = np.zeros((TRIES, len(MISTAKES))), np.zeros((TRIES, len(MISTAKES)))
    for game in games:
        for turn in range(len(game.rewards)):
            fits = fitting(wordle, "".join(game.turns[: 2 * turn + 1]))
            place, left, guess = sets.of(fits), TRIES - turn, wordle.number.get(game.turns[2 * turn + 1].strip())
            value = best_v[left - 1, place] - 1 if guess is None else best_q[left, place, guess]
            regret = best_v[left, place] - value
            kind = 0 if guess is None else 2 if fits[guess] else 1
            count[turn, kind] += regret > 1e-9
            lost[turn, kind] += regret
    return count / len(games), lost / len(games)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this game."""
    parser.add_argument("--problem", type=int, default=1, help="number of the list of words")
    parser.add_argument("--words", type=int, default=40, help="number of words, as in the run")
    parser.add_argument("--beta", type=float, default=BETA, help="weight of the advantage in decoding")


def diagnose(given: argparse.Namespace) -> list[Panel]:
    """Print what a run loses and how its values compare, and return them for the picture."""
    wordle, method = Wordle.drawn(given.problem, given.words), configurations.load("ilql_wordle").method
    assert isinstance(method, trlx_like.ILQLConfig)
    sets = Sets(wordle)
    exact_q, exact_v = sets.ilql(method.tau, method.gamma)
    read, words = Reader(model_folder(given.run), tokenizer()), [WORDS.index(word) for word in wordle.words]

    def respond(texts: list[str]) -> list[str]:
        logits, _, _ = read(texts, given.beta)
        return [read.tokenizer.decode([token], skip_special_tokens=True) for token in logits.argmax(dim=1).tolist()]

    games = [Game(wordle, hidden) for hidden in range(len(wordle.words))]
    score = float(np.mean(play(respond, games)))
    count, lost = losses(sets, wordle, games)
    data, (_, best) = sets.data(), sets.best()
    _, of_data = sets.following(data)
    fixed = imitation(data, exact_q - exact_v[:, :, None], method.beta, method.awac_clip, given.beta)
    _, at_best = sets.following(greedy(fixed))
    print(f"greedy score {score:.4f}, best {best[TRIES, 0]:.4f}, of the data's policy {of_data[TRIES, 0]:.4f}")
    print(f"the fixed point of the losses with tau {method.tau:g} scores {at_best[TRIES, 0]:.4f}\n")
    print("lost per game (in brackets the guesses that lose), by guess and by mistake:\n")
    rows = [
        [str(turn + 1), *(f"{lost[turn, kind]:.4f} ({count[turn, kind]:.3f})" for kind in range(len(MISTAKES)))]
        for turn in range(TRIES)
    ]
    total = [f"{lost[:, kind].sum():.4f} ({count[:, kind].sum():.3f})" for kind in range(len(MISTAKES))]
    print(table(["guess", *MISTAKES], [*rows, ["all", *total]]))
    return compared(sets, wordle, read, words, given.problem, given.beta, (exact_q, exact_v))


def compared(
    sets: Sets,
    wordle: Wordle,
    read: Reader,
    words: list[int],
    problem: int,
    beta: float,
    fixed: tuple[Floats, Floats],
) -> list[Panel]:
    """Print learned and exact V, Q and advantages at each guess of games of the data's player.

    Args:
        sets: The sets of words of the list.
        wordle: The list.
        read: The model.
        words: The token of each word. [W]
        problem: The number of the list, which draws the games.
        beta: The weight of the advantage in decoding.
        fixed: Q and V of the fixed point, see `Sets.values`.

    Returns:
        A panel for V and one for Q.
    """
    (exact_q, exact_v), (best_q, best_v), (_, of_data) = fixed, sets.best(), sets.following(sets.data())
    played = record(wordle, episodes=GAMES, seed=UNSEEN_SEED + problem).games
    panels: list[list[Floats]] = [[], [], [], [], []]
    rows = []
    for turn in range(TRIES):
        texts = ["".join(game.turns[: 2 * turn + 1]) for game in played if len(game.rewards) > turn]
        left, places = TRIES - turn, [sets.of(fitting(wordle, text)) for text in texts]
        logits, values, every_q = (part.double() for part in read(texts, beta))
        v, q = values.numpy(), every_q[:, words].numpy()  # [B], [B, W]
        aim_v, aim_q = exact_v[left, places], exact_q[left, places]
        top = best_v[left, places] - 1e-9
        by_q, by_policy = (
            best_q[left, places, choice] >= top for choice in (q.argmax(axis=1), logits[:, words].argmax(dim=1).numpy())
        )
        advantages = correlation((q - v[:, None]).ravel(), (aim_q - aim_v[:, None]).ravel(), np.ones(q.size))
        means = [part.mean() for part in (best_v[left, places], of_data[left, places], aim_v, v)]
        errors = [np.abs(v - aim_v).mean(), np.abs(q - aim_q).mean()]
        shares = [advantages, by_q.mean(), by_policy.mean()]
        rows.append([str(turn + 1), str(len(texts)), *(f"{number:.2f}" for number in (*means, *errors, *shares))])
        for parts, new in zip(panels, (aim_v, v, aim_q, q, np.full(len(v), turn + 1.0)), strict=True):
            parts.append(new)
    head = ["guess", "states", "V best", "V of data", "V exact", "V learned", "error of V", "of Q", "advantages"]
    print(f"\nover the guesses of {GAMES} new games of the data's player, {len(words)} words each:\n")
    print(table([*head, "best has largest Q", "best is likeliest"], rows))
    print('\n"exact" is the fixed point; "advantages" is the correlation of learned and exact ones')
    aim_v, v, aim_q, q, turns = (np.concatenate(parts) for parts in panels)
    draw = np.random.default_rng(0)
    some, pairs = draw.permutation(len(v))[:DRAWN], draw.permutation(q.size)[:DRAWN]
    groups = turns.astype(np.int64)
    return [
        Panel("V", aim_v[some], v[some], groups[some], "guess {}"),
        Panel("Q of words", aim_q.ravel()[pairs], q.ravel()[pairs], groups[pairs // len(words)], "guess {}"),
    ]
