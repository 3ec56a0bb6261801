"""Countdown: write an expression that uses each of three numbers once and has a given value.

    python examples/countdown.py [grpo | rloo | reinforce++] [--seed 1000] [--seeds 5] [--problem 0]

The prompt "3 5 14=6:" may be answered by "14-3-5". A small GPT-2 first imitates expressions that use the right numbers,
half of them with another value. Then it is rewarded for the right value, and evaluated on problems it has never seen.
The configurations are configs/sft_countdown.yml, configs/grpo_countdown.yml and configs/rloo_countdown.yml.

The full game also has multiplication, division, more than three numbers, and unused numbers. They are left out, so that
a model of this size can learn the task in minutes on a CPU.
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
from examples import configurations
from examples.problems import Draw, add_options, draws, summary
from examples.randomwalks.seeds import Stopwatch, measured

if TYPE_CHECKING:
    from transformers import GPT2Config, PreTrainedTokenizerFast

NUMBERS, COUNT, HIGHEST_TARGET = range(1, 21), 3, 60
HELD_OUT = 500
EXAMPLES, RIGHT = 50000, 0.4
LONGEST = 32
"""Most characters of a text that is parsed; an expression of three numbers has at most 8."""
EOS, UNKNOWN = "<eos>", "<unk>"
TOKENS = [*"0123456789+- =:", EOS, UNKNOWN]
DIRECTORY = Path("runs/countdown")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo_countdown", {}),
    "rloo": ("rloo_countdown", {}),
    "reinforce++": ("rloo_countdown", {"baseline": "batch", "loss_type": "dapo"}),
}
"""The configuration file of each method, and the method's options to change in it."""


def read(expression: str) -> tuple[int, list[int]] | None:
    """Parse a sum of whole numbers with + and -, such as "5+12-3": value and numbers, or None for any other text.

    The text of a model is parsed and never executed. Texts longer than `LONGEST` are refused.
    """
    if len(expression) > LONGEST or not re.fullmatch(r"[0-9]+([+-][0-9]+)*", expression):
        return None
    terms = [int(term) for term in re.findall(r"[+-]?[0-9]+", expression)]
    return sum(terms), [abs(term) for term in terms]


@dataclass(frozen=True)
class Problem:
    """Hold the numbers of a problem in rising order, and the value that its expression must have."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}:"

    def row(self) -> dict[str, Any]:
        """Return the prompt, with the keys that the reward function needs."""
        return {"prompt": self.prompt, "numbers": list(self.numbers), "target": self.target}

    def score(self, expression: str) -> float:
        """Return 1 for an expression of the right value that uses each number once, else 0."""
        result = read(expression)
        return float(result is not None and result[0] == self.target and tuple(sorted(result[1])) == self.numbers)


def expressions(numbers: Sequence[int]) -> list[str]:
    """List all expressions of these numbers, in any order and with any signs between them."""
    orders, signs = set(permutations(numbers)), list(product("+-", repeat=COUNT - 1))
    return sorted(
        "".join(f"{n}{s}" for n, s in zip(order, (*row, ""), strict=True)) for order in orders for row in signs
    )


class Countdown:
    """Hold all problems of three numbers that have a solution, split into training and held-out problems."""

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
        """Draw an expression: a right one with probability `RIGHT`, otherwise any (of which one in five is right)."""
        right = self.rng.random() < RIGHT
        return self.rng.choice(self.solutions[problem] if right else self.expressions[problem.numbers])


@cache
def default_task() -> Countdown:
    """Return the problems that the functions below share."""
    return Countdown()


@cache
def samples() -> list[tuple[str, str]]:
    """Return problems with expressions to imitate first."""
    return drawn_samples(default_task())


def drawn_samples(task: Countdown) -> list[tuple[str, str]]:
    """Draw training problems with an expression for each."""
    return [(problem.prompt, task.sample(problem)) for problem in task.rng.choices(task.train, k=EXAMPLES)]


def prompts() -> list[dict[str, Any]]:
    """Return the training problems."""
    return [problem.row() for problem in default_task().train]


def eval_prompts() -> list[dict[str, Any]]:
    """Return the held-out problems."""
    return [problem.row() for problem in default_task().held_out]


def reward_fn(outputs: Sequence[str], numbers: Sequence[list[int]], target: Sequence[int], **_: object) -> list[float]:
    """Score 1 for a right answer, else 0."""
    rows = zip(outputs, numbers, target, strict=True)
    return [Problem(tuple(given), wanted).score(output) for output, given, wanted in rows]


def metric_fn(outputs: Sequence[str], numbers: Sequence[list[int]], **_: object) -> dict[str, list[float]]:
    """Measure "valid": whether an answer uses each number exactly once, whatever its value."""
    found = [read(output) for output in outputs]
    rows = zip(found, numbers, strict=True)
    return {"valid": [float(result is not None and sorted(result[1]) == given) for result, given in rows]}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, and EOS; it pads on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=EOS, pad_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def model_config() -> GPT2Config:
    """Configure a GPT-2 with 3 layers of width 96, .3 million parameters and no dropout."""
    from transformers import GPT2Config

    end = TOKENS.index(EOS)
    return GPT2Config(
        vocab_size=len(TOKENS),
        n_positions=24,
        n_embd=96,
        n_layer=3,
        n_head=3,
        initializer_range=0.08,  # the usual 0.02 is for wider models: this one would learn late
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def train_start(directory: Path, task: Countdown | None = None) -> str:
    """Return the path of the model that imitates, trained first if the folder lacks it.

    task: what is split into training and held-out problems; by default that of the YAML files.
    """
    model = directory / "hf_model"
    if not (model / "model.safetensors").exists():
        config = configurations.load("sft_countdown").evolve(train={"checkpoint_dir": str(directory)})
        data: dict[str, Any] = {}
        if task is not None:
            held_out = [problem.row() for problem in task.held_out]
            data = {"samples": drawn_samples(task), "eval_prompts": held_out}
        trlx_like.train(config, **data).save_pretrained(model)
    return str(model)


def start() -> str:
    """Return the folder of the trained model, which the first call trains. YAML files name it as `model.model_path`."""
    return train_start(DIRECTORY / "start")


def run(method: str, draw: Draw, starts: Path) -> tuple[list[float], float]:
    """Train from the start of a split; return the solved share of held-out problems per evaluation, and CPU seconds."""
    task = Countdown(draw.problem)
    model = train_start(starts / f"split{draw.problem}", task)
    file, options = METHODS[method]
    folder = draw.directory / method
    train = {"seed": draw.seed, "checkpoint_dir": str(folder), "resume_from_checkpoint": None}
    config = configurations.load(file)
    watch = Stopwatch()
    training, held_out = ([problem.row() for problem in part] for part in (task.train, task.held_out))
    config = config.evolve(model={"model_path": model}, method=options, train=train)
    trlx_like.train(config, prompts=training, eval_prompts=held_out)
    return measured(folder, "reward/mean"), watch.lap()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="grpo", choices=METHODS, help="what learns (default grpo)")
    add_options(parser, 1000, DIRECTORY, "split into training and held-out problems")
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = draws(given)
    results = [run(given.method, draw, given.directory / "start") for draw in drawn]
    print("\nsplit  seed  held-out problems solved at each evaluation; CPU seconds without the start")
    for draw, ((before, *curve), seconds) in zip(drawn, results, strict=True):
        values = " ".join(f"{value:.3f}" for value in curve)
        print(f"{draw.problem:5}  {draw.seed}  {before:.3f} -> {values}  {seconds:6.1f}")
    print(f"at the end: {summary(drawn, [curve[-1] for curve, _ in results])}")


if __name__ == "__main__":
    main()
