"""Wordle as a language task: guess a hidden word of five letters in six tries, from a clue for each letter.

The task is that of Snell et al. 2022, arXiv:2206.11871, and of Abdulhai et al. 2023, "LMRL Gym", arXiv:2311.18232, in
the size of the latter: 431 words. A clue is "g" where the letter is right, "y" where the hidden word has the letter
anywhere, "b" where it has not; letters that come twice are not counted. A wrong guess costs 1, the right one nothing
and ends the episode, as the sixth guess does. Letters that are no word of the list cost 1 as well and get no clue. So
scores go from -6 to 0.

    Wordle:
    stone
    s- t2? o- n- e5!
    ...

A word is one token, so a guess is one action. A clue line has one token for each letter of the guess, and each is a
fact by itself: "s-" there is no s, "t2?" there is a t and not at the second place, "e5!" the fifth letter is an e. So
whether a word fits is a sum over tokens that were read, which a small network learns from few games. The benchmark
spells: "s t o n e" and the colours alone, "b y b b g". Its model has to look back for the letter and count for the
place, and to know letter by letter which words are left; our small one from random weights learned to spell that way
and hardly to read.

The words are our own list of common ones, not the benchmark's, so scores are near its scores and not the same. There
the hidden word is drawn anew each turn among those that fit all clues; here it stays, which to a player is the same
game.

The data (`samples`, `rewards`) are games of a player that with probability `SMART` says a random word that fits all
clues, and else any word. A whole game is one dialogue, with a reward a turn.

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
SPELLING = 0.044  # deviation of a letter in a row: of five together .1
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
        """The clue as it is read: a fact for each letter of the guess, as in "s- t2? o- n- e5!"."""
        marks = (self.clues[guess, hidden] // 3 ** np.arange(LETTERS) % 3).tolist()
        return " ".join(map(fact, self.words[guess], range(1, LETTERS + 1), marks)) + "\n"

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


def fact(letter: str, place: int, mark: int) -> str:
    """What a clue says of a letter. Of one that the hidden word has not, the place does not matter."""
    return {BLACK: f"{letter}-", YELLOW: f"{letter}{place}?", GREEN: f"{letter}{place}!"}[mark]


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
    """Games to learn from."""

    games: list[Game]

    def __post_init__(self) -> None:
        self.samples = [game.turns for game in self.games]
        self.rewards = [[*game.rewards, 0.0] for game in self.games]  # the last for the EOS that ends a game


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
                games[-1].say(wordle.words[guess])
    return Data(games)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and one a fact of a clue; pads left.

    Line ends are white space like others: "stone\\n" comes back as "stone".
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
    """The vocabulary in the order of its ids: words, facts, the opening and the specials."""
    places = range(1, LETTERS + 1)
    facts = [fact(letter, place, mark) for mark in range(3) for place in places for letter in ascii_lowercase]
    return [*WORDS, *dict.fromkeys(facts), OPENING.strip(), NO_WORD.strip(), BOS, EOS, PAD, UNKNOWN]


def model() -> LlamaForCausalLM:
    """A Llama of 1 layer and width 128, 0.3 million random weights, that can spell and knows nothing of the game.

    The row of a word, where it is read and where it is written, is a sum over its letters in their places, so what is
    learned of a letter in one word holds for the others. A pretrained model comes with such knowledge of its tokens.
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
        initializer_range=0.05,  # the usual 0.02 is for wider models: this one would start to learn late
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
