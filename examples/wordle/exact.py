"""Solve a small Wordle exactly: the best policy, the value of any policy guess by guess, and the fixed point of ILQL.

All that matters of a game so far is the set of words that fit its clues, each as likely, and the number of guesses that
are left. A list of 40 words has some 700 such sets, one of 100 words some 15,000. All words of the list may be guessed,
also those that cannot be right but tell the others apart.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from examples.values import Floats, expectiles
from examples.wordle.task import SMART, TRIES, Bools, Wordle

MOST_WORDS = 100
"""Largest list that is solved: the number of sets grows faster than its square."""


class Sets:
    """All sets of words that may be left in a game, with the recursion of values over them.

    Args:
        wordle: The list of words, of at most `MOST_WORDS`.

    Raises:
        ValueError: For a longer list.
    """

    def __init__(self, wordle: Wordle) -> None:
        self.size = len(wordle.words)
        if self.size > MOST_WORDS:
            raise ValueError(f"words: {self.size} are too many for exact values, at most {MOST_WORDS} are solved.")
        answers = []  # for each guess the words of each clue, as bits, and whether the clue says that it is right
        for row in wordle.clues:
            answers.append([(bits(row == clue), clue == wordle.right) for clue in np.unique(row)])
        found = [bits(np.ones(self.size, dtype=bool))]
        self.number = {found[0]: 0}
        places, after, weights = [], [], []
        for place, words in enumerate(found):  # the list grows
            for guess, clues in enumerate(answers):
                for answer, right in clues:
                    if (left := words & answer) and not right:
                        if left not in self.number:
                            self.number[left] = len(found)
                            found.append(left)
                        places.append(place * self.size + guess)
                        after.append(self.number[left])
                        weights.append(left.bit_count() / words.bit_count())
        self.fits: Bools = np.array([[words >> word & 1 for word in range(self.size)] for words in found], dtype=bool)
        """Whether each word is in each set. [N, W]"""
        self._places, self._after, self._weights = np.array(places), np.array(after), np.array(weights)
        probability = np.bincount(self._places, self._weights, self.fits.size).astype(np.float64)
        self.wrong: Floats = probability.reshape(self.fits.shape)
        """Probability that a guess is wrong. [N, W]"""

    def of(self, fits: Bools) -> int:
        """Return the number of a set of words [W]."""
        return self.number[bits(fits)]

    def values(self, choose: Callable[[int, Floats], Floats], gamma: float = 1.0) -> tuple[Floats, Floats]:
        """Compute Q of every guess and V of every set, from the last guess to the first.

        Args:
            choose: Gives V [N] from the number of guesses left and their Q [N, W].
            gamma: The discount of a guess.

        Returns:
            Q [TRIES + 1, N, W] and V [TRIES + 1, N], by the number of guesses left.
        """
        q, v = np.zeros((TRIES + 1, *self.fits.shape)), np.zeros((TRIES + 1, len(self.fits)))
        for left in range(1, TRIES + 1):
            following = np.bincount(self._places, self._weights * v[left - 1][self._after], self.fits.size)
            q[left] = gamma * following.reshape(self.fits.shape) - self.wrong
            v[left] = choose(left, q[left])
        return q, v

    def best(self) -> tuple[Floats, Floats]:
        """Compute Q and V of the best policy, see `values`."""
        return self.values(lambda _, q: q.max(axis=1))

    def following(self, policy: Floats) -> tuple[Floats, Floats]:
        """Compute Q and V of a policy [TRIES + 1, N, W], or [N, W] if it is the same for all guesses, see `values`."""
        by_left = np.broadcast_to(policy, (TRIES + 1, *self.fits.shape))
        return self.values(lambda left, q: (by_left[left] * q).sum(axis=1))

    def data(self, smart: float = SMART) -> Floats:
        """Return the policy of `Wordle.play_randomly`. [N, W]"""
        fitting = self.fits / self.fits.sum(axis=1, keepdims=True)
        policy: Floats = smart * fitting + (1 - smart) / self.size
        return policy

    def ilql(self, tau: float, gamma: float) -> tuple[Floats, Floats]:
        """Compute what ILQL's Q and V would be with infinite data, no network and no conservative loss, see `values`.

        V is the tau-expectile of Q over the guesses of the data's policy.
        """
        data = self.data()
        return self.values(lambda _, q: expectiles(q, data, tau), gamma)


def imitation(data: Floats, advantages: Floats, sharpness: float, clip: float | None, beta: float) -> Floats:
    """Return what a perfect network decodes with: the data's policy by AWAC's weight and e^(beta A).

    Args:
        data: The policy of the data. [N, W]
        advantages: Q - V. [TRIES + 1, N, W]
        sharpness: `method.beta` of ILQL.
        clip: `method.awac_clip` of ILQL.
        beta: The weight of the advantage in decoding.

    Returns:
        A policy [TRIES + 1, N, W].
    """
    pull = sharpness * advantages
    logits = np.log(data) + (pull if clip is None else np.minimum(pull, np.log(clip))) + beta * advantages
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    policy: Floats = weights / weights.sum(axis=2, keepdims=True)
    return policy


def greedy(policy: Floats) -> Floats:
    """Return the policy that says the likeliest word, the first one of several. [..., W]"""
    likeliest: Floats = np.eye(policy.shape[-1])[policy.argmax(axis=-1)]
    return likeliest


def bits(fits: Bools) -> int:
    """Write a set of words [W] as the bits of a number."""
    return sum(1 << int(word) for word in np.flatnonzero(fits))
