"""Countdown: write an expression that uses each of three numbers once and has the value that is asked for.

    python examples/countdown.py [grpo | rloo | reinforce++] [--seed 1000] [--seeds 5]

The prompt "3 5 14=6:" may be answered by "14-3-5". A small GPT-2 first imitates expressions that use the right numbers,
half of them with another value. Then it is rewarded for the right value, and evaluated on problems it has never seen.
The configurations are configs/sft_countdown.yml, configs/grpo_countdown.yml and configs/rloo_countdown.yml.

Of the full game this leaves out multiplication and division, more than three numbers, and numbers that stay unused: a
model of this size learns what is left in minutes on a CPU.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch

import trlx_like
from examples.randomwalks.seeds import Stopwatch, measured

if TYPE_CHECKING:
    from transformers import GPT2Config, PreTrainedTokenizerFast

NUMBERS, COUNT, HIGHEST_TARGET = range(1, 21), 3, 60
HELD_OUT = 500
EXAMPLES, RIGHT = 50000, 0.4
LONGEST = 32
"""Characters of a text that is looked at as an expression; that of three numbers has at most 8."""
EOS, UNKNOWN = "<eos>", "<unk>"
TOKENS = [*"0123456789+- =:", EOS, UNKNOWN]
DIRECTORY = Path("runs/countdown")
CONFIGS = Path(__file__).parents[1] / "configs"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo_countdown.yml", {}),
    "rloo": ("rloo_countdown.yml", {}),
    "reinforce++": ("rloo_countdown.yml", {"baseline": "batch", "loss_type": "dapo"}),
}
"""The file of each method, and options of the method to change in it."""


def read(expression: str) -> tuple[int, list[int]] | None:
    """Value and numbers of a sum of whole numbers with + and -, such as "5+12-3"; None for any other text.

    What a model writes is read here and never run. Longer texts than `LONGEST` are not looked at.
    """
    if len(expression) > LONGEST or not re.fullmatch(r"[0-9]+([+-][0-9]+)*", expression):
        return None
    terms = [int(term) for term in re.findall(r"[+-]?[0-9]+", expression)]
    return sum(terms), [abs(term) for term in terms]


@dataclass(frozen=True)
class Problem:
    """Numbers in rising order, and the value that an expression of them is to have."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}:"

    def row(self) -> dict[str, Any]:
        """A prompt with what its answers are scored by."""
        return {"prompt": self.prompt, "numbers": list(self.numbers), "target": self.target}

    def score(self, expression: str) -> float:
        """1 for an expression of this value that uses each number once, else 0."""
        result = read(expression)
        return float(result is not None and result[0] == self.target and tuple(sorted(result[1])) == self.numbers)


def expressions(numbers: Sequence[int]) -> list[str]:
    """All expressions of these numbers, in any order and with any signs between them."""
    orders, signs = set(permutations(numbers)), list(product("+-", repeat=COUNT - 1))
    return sorted(
        "".join(f"{n}{s}" for n, s in zip(order, (*row, ""), strict=True)) for order in orders for row in signs
    )


class Countdown:
    """All problems of three numbers that have a solution, divided into those to learn from and those held out."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.expressions: dict[tuple[int, ...], list[str]] = {}
        self.solutions: dict[Problem, list[str]] = {}
        for numbers in combinations_with_replacement(NUMBERS, COUNT):
            self.expressions[numbers] = expressions(numbers)
            for expression in self.expressions[numbers]:
                result = read(expression)
                if result is not None and 0 < result[0] <= HIGHEST_TARGET:
                    self.solutions.setdefault(Problem(numbers, result[0]), []).append(expression)
        problems = list(self.solutions)
        self.rng.shuffle(problems)
        self.train, self.held_out = problems[HELD_OUT:], problems[:HELD_OUT]

    def sample(self, problem: Problem) -> str:
        """A right expression in `RIGHT` of the cases, and any at all in the others, of which one in five is right."""
        right = self.rng.random() < RIGHT
        return self.rng.choice(self.solutions[problem] if right else self.expressions[problem.numbers])


@cache
def default_task() -> Countdown:
    """The problems that the functions below share."""
    return Countdown()


@cache
def samples() -> list[tuple[str, str]]:
    """Problems and the expressions that are imitated first."""
    task = default_task()
    return [(problem.prompt, task.sample(problem)) for problem in task.rng.choices(task.train, k=EXAMPLES)]


def prompts() -> list[dict[str, Any]]:
    """The problems to learn from."""
    return [problem.row() for problem in default_task().train]


def eval_prompts() -> list[dict[str, Any]]:
    """The problems that were held out."""
    return [problem.row() for problem in default_task().held_out]


def reward_fn(outputs: Sequence[str], numbers: Sequence[list[int]], target: Sequence[int], **_: object) -> list[float]:
    """1 for an answer with the value that is asked for, else 0."""
    rows = zip(outputs, numbers, target, strict=True)
    return [Problem(tuple(given), wanted).score(output) for output, given, wanted in rows]


def metric_fn(outputs: Sequence[str], numbers: Sequence[list[int]], **_: object) -> dict[str, list[float]]:
    """ "valid": whether an answer is an expression that uses each number once, whatever its value."""
    found = [read(output) for output in outputs]
    rows = zip(found, numbers, strict=True)
    return {"valid": [float(result is not None and sorted(result[1]) == given) for result, given in rows]}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and the end; pads left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=EOS, pad_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def model_config() -> GPT2Config:
    """A GPT-2 of 3 layers and width 96, .3 million parameters, without dropout."""
    from transformers import GPT2Config

    end = TOKENS.index(EOS)
    return GPT2Config(
        vocab_size=len(TOKENS),
        n_positions=24,
        n_embd=96,
        n_layer=3,
        n_head=3,
        initializer_range=0.08,  # the usual 0.02 is for wider models: this one would start to learn late
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def train_start(directory: Path) -> str:
    """Where the model that imitates is, trained unless the folder has it."""
    model = directory / "hf_model"
    if not (model / "model.safetensors").exists():
        config = trlx_like.TRLConfig.load_yaml(CONFIGS / "sft_countdown.yml")
        trlx_like.train(config.evolve(train={"checkpoint_dir": str(directory)})).save_pretrained(model)
    return str(model)


def start() -> str:
    """Where the trained start is, made at the first call. A YAML names it as its `model.model_path`."""
    return train_start(DIRECTORY / "start")


def run(method: str, seed: int, directory: Path) -> tuple[list[float], float]:
    """From one start for all: the share of held-out problems solved at each evaluation, and CPU seconds."""
    model = train_start(directory / "start")
    file, options = METHODS[method]
    folder = directory / method / f"seed{seed}"
    train = {"seed": seed, "checkpoint_dir": str(folder), "resume_from_checkpoint": None}
    config = trlx_like.TRLConfig.load_yaml(CONFIGS / file)
    watch = Stopwatch()
    trlx_like.train(config.evolve(model={"model_path": model}, method=options, train=train))
    return measured(folder, "reward/mean"), watch.lap()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="grpo", choices=METHODS, help="what learns (default grpo)")
    parser.add_argument("--seed", type=int, default=1000, help="of the training; the problems stay the same")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from --seed up")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where the runs go")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {seed: run(given.method, seed, given.directory) for seed in range(given.seed, given.seed + given.seeds)}
    print("\nseed  held-out problems solved at each evaluation; CPU seconds without the start")
    for seed, ((before, *curve), seconds) in results.items():
        print(f"{seed}  {before:.3f} -> {' '.join(f'{value:.3f}' for value in curve)}  {seconds:6.1f}")


if __name__ == "__main__":
    main()
