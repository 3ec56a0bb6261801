"""Wordle as a language task: guess a hidden word of five letters in six tries, from a clue for each letter.

The task is that of Snell et al. 2022, arXiv:2206.11871, and of Abdulhai et al. 2023, "LMRL Gym", arXiv:2311.18232, in
the size of the latter: 431 words. A clue is "g" where the letter is right, "y" where the hidden word has the letter
anywhere, "b" where it has not; letters that come twice are not counted. A wrong guess costs 1, the right one nothing
and ends the episode, as the sixth guess does. Letters that are no word of the list cost 1 as well and get no clue. So
scores go from -6 to 0.

    Wordle:
    s t o n e
    sb ty ob nb eg
    ...

A clue line has each letter with its colour, one token for both. The benchmark has the colours alone, "b y b b g", for
which a model first has to learn to look five tokens back.

The words are our own list of common ones, not the benchmark's, so scores are near its scores and not the same. There
the hidden word is drawn anew each turn among those that fit all clues; here it stays, which to a player is the same
game.

The data (`samples`, `rewards`) are games of a player that with probability `SMART` says a random word that fits all
clues, and else any word. A whole game is one dialogue, with a reward a turn.

A YAML run needs no script: `data.samples: examples/wordle/task.py:samples` and likewise `rewards` refer to the
functions at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())
LETTERS = 5
TRIES = 6
OPENING = "Wordle:\n"
NO_WORD = "none\n"
BLACK, YELLOW, GREEN = range(3)
COLOURS = "byg"
EPISODES = 40000
SMART = 0.34
DATA_SEED = 1
BOS, EOS, PAD, UNKNOWN = "<|bos|>", "<|eos|>", "<|pad|>", "<|unknown|>"

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class Wordle:
    """A list of words and the clue that each gives about each other."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self.words = list(words)
        self.number = {word: index for index, word in enumerate(words)}
        letters = np.array([[ord(letter) for letter in word] for word in words])  # [W, 5]
        has = (letters[:, None, :, None] == letters[None, :, None, :]).any(axis=3)  # [guess, hidden, 5]
        same = letters[:, None, :] == letters[None, :, :]
        marks = np.where(same, GREEN, np.where(has, YELLOW, BLACK))
        self.clues: Ints = marks @ 3 ** np.arange(LETTERS)  # [guess, hidden], a number for each clue
        self.right = GREEN * sum(3**place for place in range(LETTERS))

    def clue_line(self, guess: int, hidden: int) -> str:
        """The clue as it is read: each letter of the guess with its colour, as in "sb ty ob nb eg"."""
        marks = self.clues[guess, hidden] // 3 ** np.arange(LETTERS) % 3
        return line(letter + COLOURS[mark] for letter, mark in zip(self.words[guess], marks, strict=True))

    def fitting(self, fits: Bools, guesses: Ints, hidden: Ints) -> Bools:
        """What is left of the words that fit, [B, W], once `guesses` [B] about `hidden` [B] got their clues."""
        left: Bools = fits & (self.clues[guesses] == self.clues[guesses, hidden][:, None])
        return left

    def play_randomly(self, hidden: Ints, smart: float, rng: np.random.Generator) -> list[list[int]]:
        """The guesses of a game about each hidden word: with probability `smart` any that fits, else any at all."""
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
        """Minus the number of wrong guesses."""
        return -float(sum(guess != hidden for guess in guesses))

    def informed_score(self) -> float:
        """Mean score over all words of a player who says the fitting word whose clue tells most, in bits.

        Not quite the optimum: it looks one clue ahead, and never says a word that cannot be right.
        """
        return -self._informed_cost(np.arange(len(self.words)), TRIES) / len(self.words)

    def _informed_cost(self, left: Ints, tries: int) -> float:
        """Wrong guesses over all words in `left`, with `tries` guesses to go."""
        if tries == 0:
            return 0.0
        clues = self.clues[np.ix_(left, left)]
        sizes = np.stack([np.bincount(row, minlength=self.right + 1) for row in clues])  # [guess, clue]
        row = clues[(sizes * np.log(np.maximum(sizes, 1))).sum(axis=1).argmin()]
        others = [left[row == clue] for clue in np.unique(row) if clue != self.right]
        return sum(len(rest) + self._informed_cost(rest, tries - 1) for rest in others)


def line(parts: Iterable[str]) -> str:
    """What the model reads and writes as so many tokens: "s t o n e" and the end of the line."""
    return " ".join(parts) + "\n"


class Game:
    """A game that is being played: an `examples.play.Episode`."""

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
        """A guess. The right word and the last try end the game; what is no word is answered "none"."""
        letters = words.split()
        known = all(len(letter) == 1 for letter in letters) and len(letters) == LETTERS
        guess = self.wordle.number.get("".join(letters)) if known else None
        right = guess == self.hidden
        self.rewards.append(0.0 if right else -1.0)
        self.over = right or len(self.rewards) == TRIES
        self.turns.append(line(letters))
        if not self.over:
            self.turns.append(NO_WORD if guess is None else self.wordle.clue_line(guess, self.hidden))


@dataclass
class Data:
    """Games to learn from."""

    games: list[Game]

    def __post_init__(self) -> None:
        self.samples = [game.turns for game in self.games]
        self.rewards = [game.rewards for game in self.games]


def record(wordle: Wordle, episodes: int = EPISODES, smart: float = SMART, seed: int = DATA_SEED) -> Data:
    """Games of `Wordle.play_randomly`, about words that are drawn evenly."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(len(wordle.words), size=episodes)
    games = []
    for start in range(0, episodes, 1000):
        part = hidden[start : start + 1000]
        for word, guesses in zip(part.tolist(), wordle.play_randomly(part, smart, rng), strict=True):
            games.append(Game(wordle, word))
            for guess in guesses:
                games[-1].say(line(wordle.words[guess]))
    return Data(games)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, and one a letter with its colour, so that guess and clue are 5 tokens each; pads left.

    Line ends are white space like others: "s t o n e\\n" comes back as "s t o n e".
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens())}, UNKNOWN))
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
    )


def tokens() -> list[str]:
    """The vocabulary in the order of its ids: letters, letters with colours, the opening and the specials."""
    coloured = [letter + colour for colour in COLOURS for letter in ascii_lowercase]
    return [*ascii_lowercase, *coloured, OPENING.strip(), NO_WORD.strip(), BOS, EOS, PAD, UNKNOWN]


def model_config() -> LlamaConfig:
    """A Llama of 2 layers and width 128, 0.4 million parameters, with room for six guesses and five clues."""
    from transformers import LlamaConfig

    ids = tokens()
    return LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=64,
        initializer_range=0.08,  # the usual 0.02 is for wider models: this one would start to learn late
        bos_token_id=ids.index(BOS),
        eos_token_id=ids.index(EOS),
        pad_token_id=ids.index(PAD),
    )


@cache
def default_wordle() -> Wordle:
    """The words that the functions below share."""
    return Wordle()


@cache
def default_data() -> Data:
    """The games that the functions below share."""
    return record(default_wordle())


def samples() -> list[list[str]]:
    """Dialogues: opening, guess, clue, guess, clue, ..., guess."""
    return default_data().samples


def rewards() -> list[list[float]]:
    """The reward of each guess of each dialogue."""
    return default_data().rewards
