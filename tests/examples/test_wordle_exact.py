"""Exact values of a small Wordle by hand, against all policies, against play, and what a game loses."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from examples.wordle.exact import MOST_WORDS, Sets, greedy, imitation
from examples.wordle.task import SMART, TRIES, WORDS, Game, Wordle
from examples.wordle.values import losses

THREE = ["about", "actor", "apple"]  # "about" tells the other two apart, and so does "actor"; "apple" does not


def brute_force(words: list[str]) -> float:
    """Search all plays with the clues as text, without sets, memory of states or arrays."""
    wordle = Wordle(words)

    def cost(hidden: tuple[int, ...], tries: int) -> float:
        """Return the least number of wrong guesses, summed over the words that may be hidden."""
        if tries == 0 or not hidden:
            return 0
        ways = []
        for guess in range(len(words)):
            clues: dict[str, list[int]] = {}
            for word in hidden:
                if word != guess:
                    clues.setdefault(wordle.clue_line(guess, word), []).append(word)
            ways.append(sum(len(left) + known(tuple(left), tries - 1) for left in clues.values()))
        return min(ways)

    known = cache(cost)
    return -known(tuple(range(len(words))), TRIES) / len(words)


def test_three_words_by_hand() -> None:
    """The first guess is right for one word of three; after it the others are known: (0 + 1 + 1) / 3 wrong guesses."""
    sets = Sets(Wordle(THREE))
    q, v = sets.best()
    assert v[TRIES, 0] == pytest.approx(-2 / 3)
    assert q[TRIES, 0] == pytest.approx([-2 / 3, -2 / 3, -1])  # after "apple" two are left: 0 + 1 + 2
    assert q[1, 0] == pytest.approx([-2 / 3] * 3)  # with one guess left, two of three are wrong
    left = sets.of(np.array([True, True, False]))
    assert v[TRIES - 1, left] == -0.5  # one of two, and then the other
    assert q[TRIES - 1, left] == pytest.approx([-0.5, -0.5, -1.5])  # "apple" is wrong, and tells nothing
    assert q[1, left] == pytest.approx([-0.5, -0.5, -1])
    alone = sets.of(np.array([False, False, True]))
    assert q[3, alone] == pytest.approx([-1, -1, 0])
    assert v[0].tolist() == [0] * len(sets.fits)  # nothing is lost after the last guess


def test_a_word_that_cannot_be_right_may_be_best() -> None:
    """The clue to "zzzzz" leaves the first four words. "abcxz" tells all apart, and each of them only itself.

    "aight" is wrong three times of four, and then 2 + 1 more are: 6 / 4. "abcxz" is wrong, and then the word is known.
    With two guesses left, "aight" and then one of three are wrong 3 + 2 times of 4.
    """
    words = ["aight", "bight", "cight", "dight", "abcxz", "zzzzz"]
    sets = Sets(Wordle(words))
    q, v = sets.best()
    four = sets.of(np.array([True] * 4 + [False] * 2))
    assert q[5, four] == pytest.approx([-1.5, -1.5, -1.5, -1.5, -1, -2])
    assert q[2, four] == pytest.approx([-1.25, -1.25, -1.25, -1.25, -1, -1.75])
    assert q[1, four] == pytest.approx([-0.75, -0.75, -0.75, -0.75, -1, -1])
    assert v[5, four] == -1 and v[TRIES, 0] == pytest.approx(brute_force(words))


@pytest.mark.parametrize("number", range(4))
def test_the_best_score_is_that_of_brute_force(number: int) -> None:
    drawn = np.random.default_rng(number).choice(WORDS, 5, replace=False).tolist()
    assert Sets(Wordle(drawn)).best()[1][TRIES, 0] == pytest.approx(brute_force(drawn))


def test_the_value_of_the_data_is_what_its_player_scores() -> None:
    wordle = Wordle.drawn(2, 20)
    sets = Sets(wordle)
    _, v = sets.following(sets.data())
    hidden = np.tile(np.arange(20), 500)
    games = wordle.play_randomly(hidden, SMART, np.random.default_rng(0))
    scores = np.array([wordle.score(guesses, word) for guesses, word in zip(games, hidden, strict=True)])
    assert abs(v[TRIES, 0] - scores.mean()) < 4 * scores.std() / len(scores) ** 0.5


def test_the_fixed_point_of_ilql_is_between_the_data_and_the_best() -> None:
    sets = Sets(Wordle.drawn(3, 20))
    _, best = sets.best()
    _, of_data = sets.following(sets.data())
    _, mean = sets.ilql(tau=0.5, gamma=1.0)
    np.testing.assert_allclose(mean, of_data)
    q, v = sets.ilql(tau=0.7, gamma=1.0)
    assert of_data[TRIES, 0] < v[TRIES, 0] < best[TRIES, 0]
    np.testing.assert_allclose(sets.ilql(tau=0.999999, gamma=1.0)[1], best, atol=1e-3)
    # What is decoded: by hand, without a clip the weights of data and decoding multiply.
    data, advantages = sets.data(), q - v[:, :, None]
    policy = data * np.exp((2 + 3) * advantages)
    policy /= policy.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(imitation(data, advantages, 2, None, 3), policy)
    _, at_best = sets.following(greedy(imitation(data, advantages, 3, 10, 4)))
    assert at_best[TRIES, 0] == pytest.approx(best[TRIES, 0])


def test_what_games_lose_adds_up_to_the_difference_to_the_best() -> None:
    """A player that says the words in the order of the list, and "zebra" first, which is no word of it."""
    wordle = Wordle.drawn(4, 12)
    sets = Sets(wordle)
    games = [Game(wordle, hidden) for hidden in range(12)]
    for game, said in product(games, ["zebra", *wordle.words[:8]]):
        if not game.over:
            game.say(said)
    count, lost = losses(sets, wordle, games)
    assert lost.sum() == pytest.approx(sets.best()[1][TRIES, 0] - np.mean([game.score for game in games]))
    assert lost[0].tolist() == pytest.approx([1, 0, 0])  # with five guesses left, the best score is still the same
    assert count[0].tolist() == [1, 0, 0]
    assert lost[5, 0] == 0 and lost[5, 1] > 0


def test_each_mistake_is_named() -> None:
    wordle = Wordle(THREE)
    sets = Sets(wordle)

    def lost(hidden: int, *said: str) -> list[float]:
        """Return the regrets of the guesses, those of the three mistakes one after the other."""
        game = Game(wordle, hidden)
        for word in said:
            game.say(word)
        regrets: list[float] = losses(sets, wordle, [game])[1][: len(said)].ravel().tolist()
        return regrets

    assert lost(2, "about", "apple") == pytest.approx([0, 0, 0, 0, 0, 0])
    assert lost(0, "apple", "about") == pytest.approx([0, 0, 1 / 3, 0, 0, 0])
    assert lost(2, "about", "about", "apple") == pytest.approx([0, 0, 0, 0, 1, 0, 0, 0, 0])  # it was wrong already
    assert lost(2, "", "about", "apple") == pytest.approx([1, 0, 0, 0, 0, 0, 0, 0, 0])


def test_a_list_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match=f"words: 431 are too many for exact values, at most {MOST_WORDS}"):
        Sets(Wordle())


def test_a_list_has_as_many_words_as_are_asked_for() -> None:
    words = Wordle.drawn(7, 40).words
    assert len(set(words)) == 40 and set(words) <= set(WORDS)
    assert Wordle.drawn(8, 40).words != words == Wordle.drawn(7, 40).words
    assert Wordle.drawn(0).words == list(WORDS) and len(Wordle.drawn(7).words) == 330
    for number in (1, 432):
        with pytest.raises(ValueError, match=f"words: {number} must be from 2 to 431"):
            Wordle.drawn(7, number)
