"""Twelve small tasks to learn by reward, none of which a preset was tuned on, and the models that learn them.

Nine are on characters, where language is not needed: a GPT-2 of random weights learns them. Three are on stories, for a
storyteller such as stories8M of `examples/assets.py`. The score of an output is in [0, 1], except sentiment in [-1, 1],
and partial success has a part of it, because random weights never write a whole solution.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from examples.problems import openings
from examples.sentiment_rewards import tfidf_reward, vader_reward

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 {}":,.+>'
POSITIONS = 128
VOWELS = "aeiou"
Row = dict[str, Any]
"""A prompt with what its score needs: the key "prompt", and the arguments of `Task.score`."""


@dataclass(frozen=True)
class Task:
    """Describe a task: its prompts, and the score of an output."""

    draw: Callable[[random.Random], Row]
    score: Callable[..., float]  # of the output, and of the other keys of its row as keywords
    stories: bool = False  # it needs a model that knows words
    noise: float = 0.0  # deviation of what is added to the score when it is a reward

    def prompts(self, count: int, seed: int) -> list[Row]:
        """Draw prompts."""
        rng = random.Random(seed)
        return [self.draw(rng) for _ in range(count)]

    def scores(self, outputs: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """Score outputs; the columns are those of their rows, and others that are not used."""
        names = self.draw(random.Random(0)).keys() - {"prompt"}
        rows = ({name: columns[name][place] for name in names} for place in range(len(outputs)))
        return [self.score(output, **row) for output, row in zip(outputs, rows, strict=True)]

    def reward(self, seed: int = 0) -> Callable[..., list[float]]:
        """Make the reward function: the scores, and the noise."""
        rng = random.Random(seed)

        def reward_fn(outputs: Sequence[str], **columns: Any) -> list[float]:
            return [score + rng.gauss(0, self.noise) for score in self.scores(outputs, **columns)]

        return reward_fn


def near(value: float, wanted: float, tolerance: float) -> float:
    """Return 1 for the wanted value, falling to 0 at a distance of `tolerance`."""
    return max(0.0, 1 - abs(value - wanted) / tolerance)


def matches(output: str | Sequence[str], wanted: str) -> float:
    """Return the share of places at which two sequences agree, of the longer one."""
    return sum(a == b for a, b in zip(output, wanted, strict=False)) / max(len(output), len(wanted))


def word(rng: random.Random, length: int = 3) -> str:
    return "".join(rng.choices(CHARACTERS[:26], k=length))


def letters(output: str, letter: str) -> float:
    """Write the letter three times."""
    return near(output.count(letter), 3, 3)


def digits(output: str, wanted: str) -> float:
    """Write the digits in order."""
    return matches(output, wanted)


def is_json(output: str) -> float:
    """Write an object of JSON, of any content."""
    parts = [output.startswith("{"), output.endswith("}"), '"' in output, ":" in output]
    try:
        valid = isinstance(json.loads(output), dict)
    except ValueError:
        valid = False
    return 0.15 * sum(parts) + 0.4 * valid


def rhyme(output: str, ending: str) -> float:
    """End like the word of the prompt: both letters, the last one, or one of its kind."""
    if output.endswith(ending):
        return 1.0
    last = output[-1:]
    return 0.5 if last == ending[-1] else 0.2 * (last.isalpha() and (last in VOWELS) == (ending[-1] in VOWELS))


def length(output: str, wanted: int) -> float:
    """Write that many characters."""
    return near(len(output), wanted, wanted)


def arithmetic(output: str, wanted: int) -> float:
    """Write the sum; a number near it is better than one that is not, and a number better than letters."""
    if output.isdecimal():
        return 0.3 + 0.7 * near(int(output[:9]), wanted, 10)
    return 0.2 * sum(map(str.isdecimal, output)) / max(len(output), 1)


def acrostic(output: str, wanted: str) -> float:
    """Write words whose first letters are the word of the prompt."""
    return matches([part[0] for part in output.split()], wanted)


def sentiment(output: str, sign: int) -> float:
    """Write happily or sadly, as the prompt says."""
    return sign * vader_reward([output])[0]


def forbidden(output: str) -> float:
    """Write without common words."""
    return 1 / (1 + sum(part in ("the", "was", "and", "to") for part in output.lower().split()))


def rubric(output: str) -> float:
    """Write like a good review, as a linear classifier of reviews sees it."""
    return (tfidf_reward([output])[0] + 1) / 2


def _letters(rng: random.Random) -> Row:
    letter = rng.choice("aeinorst")
    return {"prompt": f"{letter}>", "letter": letter}


def _digits(rng: random.Random) -> Row:
    given = "".join(rng.choices("0123456789", k=4))
    return {"prompt": f"{given}>", "wanted": "".join(sorted(given))}


def _rhyme(rng: random.Random) -> Row:
    given = word(rng, 1) + rng.choice(["at", "en", "ig", "og", "un", "ay", "ee", "ow"])
    return {"prompt": f"{given}>", "ending": given[-2:]}


def _length(rng: random.Random) -> Row:
    wanted = rng.randint(3, 15)
    return {"prompt": f"{wanted}>", "wanted": wanted}


def _arithmetic(rng: random.Random) -> Row:
    left, right = rng.randrange(10), rng.randrange(10)
    return {"prompt": f"{left}+{right}>", "wanted": left + right}


def _shifted(rng: random.Random) -> Row:
    given = "".join(rng.choices("abcdefgh", k=3))
    return {"prompt": f"{given}>", "wanted": "".join(chr(ord(letter) + 1) for letter in given)}


def _acrostic(rng: random.Random) -> Row:
    given = "".join(rng.choices("abcdefgh", k=3))
    return {"prompt": f"{given}>", "wanted": given}


def _sentiment(rng: random.Random) -> Row:
    sign = rng.choice([1, -1])
    return {"prompt": f"{'Happy' if sign > 0 else 'Sad'} story. {rng.choice(_openings())}", "sign": sign}


def _opening(rng: random.Random) -> Row:
    return {"prompt": rng.choice(_openings())}


@cache
def _openings() -> list[str]:
    return openings(0)[0]


TASKS = {
    "letters": Task(_letters, letters),
    "digits": Task(_digits, digits),
    "json": Task(lambda rng: {"prompt": f"{word(rng)}>"}, is_json),
    "rhyme": Task(_rhyme, rhyme),
    "length": Task(_length, length),
    "arithmetic": Task(_arithmetic, arithmetic),
    "copying": Task(_shifted, digits),
    "acrostic": Task(_acrostic, acrostic),
    "noisy letters": Task(_letters, letters, noise=0.5),
    "sentiment": Task(_sentiment, sentiment, stories=True),
    "forbidden": Task(_opening, forbidden, stories=True),
    "rubric": Task(_opening, rubric, stories=True),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each character, and for `<eos>` (0) and `<pad>` (1)."""
    ids = {token: number for number, token in enumerate(["<eos>", "<pad>", *CHARACTERS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token=".", padding_side="left"
    )


def random_model(folder: Path, seed: int = 0, layers: int = 2, width: int = 64) -> Path:
    """Save a GPT-2 of random weights with its tokenizer, unless the folder is there, and return the folder."""
    if not folder.exists():
        torch.manual_seed(seed)
        options: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": POSITIONS}
        options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        options |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "vocab_size": len(CHARACTERS) + 2}
        config = GPT2Config(**options)
        tokenizer().save_pretrained(folder)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
