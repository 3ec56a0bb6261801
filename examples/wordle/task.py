"""Wordle as a language task: guess a hidden word of five letters in six tries, from a clue for each letter.

The task is that of Snell et al. 2022, arXiv:2206.11871, and of Abdulhai et al. 2023, "LMRL Gym", arXiv:2311.18232, in
the size of the latter: 431 words. A clue is "g" if the letter is right, "y" if the hidden word has it at another place,
and "b" if it does not have it; repeated letters are not counted. A wrong guess costs 1. The right guess costs nothing
and ends the episode, as the sixth guess does. Letters that are not a word of the list cost 1 too and get no clue. So
scores go from -6 to 0.

    Wordle:
    stone
    s- t2? o- n- e5!
    ...

A word is one token, so a guess is one action. A clue line has one token for each letter of the guess, and each token
is a fact of its own: "s-": there is no s; "t2?": there is a t, but not at the second place; "e5!": the fifth letter is
an e. So whether a word fits is a sum over the tokens read, which a small network learns from few games. The benchmark
spells: "s t o n e", and the colours alone, "b y b b g". Its model has to look back for the letter, count for the place,
and know letter by letter which words remain. With that form, our small model learned to spell from random weights, but
hardly to use the clues.

The words are our own list of common words, not the benchmark's, so scores are close to its scores but not the same.
There the hidden word is drawn anew at each turn among those that fit all clues. Here it stays, which is the same game
for a player.

The data (`samples`, `rewards`) are games of a player that with probability `SMART` says a random word that fits all
clues, and otherwise any word. A whole game is one dialogue, with one reward per turn.

A YAML run needs no script: `data.samples: examples/wordle/task.py:samples` and likewise `rewards` refer to the
functions at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())
LETTERS = 5
TRIES = 6
OPENING = "Wordle:\n"
NO_WORD = "none\n"
BLACK, YELLOW, GREEN = range(3)
EPISODES = 102400
SMART = 0.34
SPELLING = 0.044  # standard deviation of a letter's vector: that of five letters is .1
DATA_SEED = 1
DRAWN = 330
BOS, EOS, PAD, UNKNOWN = "<|bos|>", "<|eos|>", "<|pad|>", "<|unknown|>"

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Wordle:
    """Hold a list of words, and the clue for each pair of guess and hidden word."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self.words = list(words)
        self.number = {word: index for index, word in enumerate(words)}
        letters = np.array([[ord(letter) for letter in word] for word in words])  # [W, 5]
        has = (letters[:, None, :, None] == letters[None, :, None, :]).any(axis=3)  # [guess, hidden, 5]
        same = letters[:, None, :] == letters[None, :, :]
        marks = np.where(same, GREEN, np.where(has, YELLOW, BLACK))
        self.clues: Ints = marks @ 3 ** np.arange(LETTERS)  # [guess, hidden], a number for each clue
        self.right = GREEN * sum(3**place for place in range(LETTERS))

    @classmethod
    def drawn(cls, number: int, words: int | None = None) -> Wordle:
        """Return a list of words.

        Args:
            number: The number of the problem, which draws the words.
            words: How many are drawn; by default all for problem 0, and `DRAWN` for any other.

        Raises:
            ValueError: If `words` is not from 2 to the length of the whole list.
        """
        if number == 0 and words is None:
            return default_wordle()
        if words is not None and not 2 <= words <= len(WORDS):
            raise ValueError(f"words: {words} must be from 2 to {len(WORDS)}, which is the whole list.")
        return cls(np.random.default_rng(number).choice(WORDS, words or DRAWN, replace=False).tolist())

    def clue_line(self, guess: int, hidden: int) -> str:
        """Write a clue as text: a fact for each letter of the guess, as in "s- t2? o- n- e5!"."""
        marks = (self.clues[guess, hidden] // 3 ** np.arange(LETTERS) % 3).tolist()
        return " ".join(map(fact, self.words[guess], range(1, LETTERS + 1), marks)) + "\n"

    def fitting(self, fits: Bools, guesses: Ints, hidden: Ints) -> Bools:
        """Return which of the words that fit [B, W] still fit after the clues to `guesses` [B] about `hidden` [B]."""
        left: Bools = fits & (self.clues[guesses] == self.clues[guesses, hidden][:, None])
        return left

    def play_randomly(self, hidden: Ints, smart: float, rng: np.random.Generator) -> list[list[int]]:
        """Play a game about each hidden word: guess a word that fits with probability `smart`, otherwise any word."""
        count = len(hidden)
        fits = np.ones((count, len(self.words)), dtype=bool)
        guesses = np.zeros((count, TRIES), dtype=np.int64)
        for turn in range(TRIES):
            considered = fits | (rng.random(count) >= smart)[:, None]
            guesses[:, turn] = (rng.random(fits.shape, dtype=np.float32) * considered).argmax(axis=1)
            fits = self.fitting(fits, guesses[:, turn], hidden)
        tries = np.where(
            (guesses == hidden[:, None]).any(axis=1), (guesses == hidden[:, None]).argmax(axis=1) + 1, TRIES
        )
        return [row[:n].tolist() for row, n in zip(guesses, tries, strict=True)]

    def score(self, guesses: Sequence[int], hidden: int) -> float:
        """Return minus the number of wrong guesses."""
        return -float(sum(guess != hidden for guess in guesses))

    def informed_score(self) -> float:
        """Compute the mean score of a player that guesses the fitting word with the most informative clue, in bits.

        This is not quite the optimum: the player looks one clue ahead, and never guesses a word that cannot be right.
        """
        return -self._informed_cost(np.arange(len(self.words)), TRIES) / len(self.words)

    def most_telling(self, left: Ints) -> int:
        """Return which of the words in `left` has the most informative clue, if the hidden word is one of them."""
        clues = self.clues[np.ix_(left, left)]
        sizes = np.stack([np.bincount(row, minlength=self.right + 1) for row in clues])  # [guess, clue]
        return int(left[(sizes * np.log(np.maximum(sizes, 1))).sum(axis=1).argmin()])

    def _informed_cost(self, left: Ints, tries: int) -> float:
        """Count the wrong guesses, summed over all words in `left`, with `tries` guesses to go."""
        if tries == 0:
            return 0.0
        row = self.clues[self.most_telling(left), left]
        others = [left[row == clue] for clue in np.unique(row) if clue != self.right]
        return sum(len(rest) + self._informed_cost(rest, tries - 1) for rest in others)


def fact(letter: str, place: int, mark: int) -> str:
    """Write a clue's fact about a letter. If the hidden word lacks the letter, its place is left out."""
    return {BLACK: f"{letter}-", YELLOW: f"{letter}{place}?", GREEN: f"{letter}{place}!"}[mark]


class Game:
    """Play one game: an `examples.play.Episode`."""

    def __init__(self, wordle: Wordle, hidden: int) -> None:
        self.wordle, self.hidden = wordle, hidden
        self.turns = [OPENING]
        self.rewards: list[float] = []
        self.over = False

    @property
    def text(self) -> str:
        return "".join(self.turns)

    @property
    def score(self) -> float:
        return sum(self.rewards)

    def say(self, words: str) -> None:
        """Make a guess. The right word or the last try ends the game; anything but a word is answered "none"."""
        word = words.strip()
        guess = self.wordle.number.get(word)
        right = guess == self.hidden
        self.rewards.append(0.0 if right else -1.0)
        self.over = right or len(self.rewards) == TRIES
        self.turns.append(f"{word}\n")
        if not self.over:
            self.turns.append(NO_WORD if guess is None else self.wordle.clue_line(guess, self.hidden))


@dataclass
class Data:
    """Hold games to learn from."""

    games: list[Game]

    def __post_init__(self) -> None:
        self.samples = [game.turns for game in self.games]
        self.rewards = [[*game.rewards, 0.0] for game in self.games]  # the last for the EOS that ends a game


def record(wordle: Wordle, episodes: int = EPISODES, smart: float = SMART, seed: int = DATA_SEED) -> Data:
    """Play games with `Wordle.play_randomly`, about uniformly drawn words."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(len(wordle.words), size=episodes)
    games = []
    for start in range(0, episodes, 1000):
        part = hidden[start : start + 1000]
        for word, guesses in zip(part.tolist(), wordle.play_randomly(part, smart, rng), strict=True):
            games.append(Game(wordle, word))
            for guess in guesses:
                games[-1].say(wordle.words[guess])
    return Data(games)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word and one per fact of a clue. It pads on the left.

    Line ends are ordinary white space: "stone\\n" comes back as "stone".
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens())}, UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
    )


def tokens() -> list[str]:
    """List the vocabulary in the order of its ids: words, facts, the opening and special tokens."""
    places = range(1, LETTERS + 1)
    facts = [fact(letter, place, mark) for mark in range(3) for place in places for letter in ascii_lowercase]
    return [*WORDS, *dict.fromkeys(facts), OPENING.strip(), NO_WORD.strip(), BOS, EOS, PAD, UNKNOWN]


def model() -> LlamaForCausalLM:
    """Make a Llama with 1 layer of width 128 and 0.3 million weights that can spell but does not know the game.

    The input and output embedding of a word are a sum over its letters at their places, so knowledge of a letter in one
    word transfers to the others. A pretrained model has such knowledge of its tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokens()
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,  # the usual 0.02 is for wider models: this one would learn late
        bos_token_id=ids.index(BOS),
        eos_token_id=ids.index(EOS),
        pad_token_id=ids.index(PAD),
    )
    lm = LlamaForCausalLM(config)
    letters = torch.randn(LETTERS, len(ascii_lowercase), config.hidden_size) * SPELLING  # [5, 26, H]
    spelled = torch.tensor([[ascii_lowercase.index(letter) for letter in word] for word in WORDS])  # [W, 5]
    rows = letters[torch.arange(LETTERS), spelled].sum(dim=1)  # [W, H]
    with torch.no_grad():
        lm.model.embed_tokens.weight[: len(WORDS)] = rows
        lm.lm_head.weight[: len(WORDS)] = rows
    return lm


@cache
def default_wordle() -> Wordle:
    """Return the words that the functions below share."""
    return Wordle()


@cache
def default_data() -> Data:
    """Return the games that the functions below share."""
    return record(default_wordle())


def samples() -> list[list[str]]:
    """Return dialogues: opening, guess, clue, guess, clue, ..., guess."""
    return default_data().samples


def rewards() -> list[list[float]]:
    """Return the reward of each guess of each dialogue."""
    return default_data().rewards
