"""DPO recovers a known order: seven words with known strengths, compared in pairs by a noisy judge.

    python examples/bradley_terry.py [--seeds 10] [--problem 1000] [--loss sigmoid]     # --loss kto: from single words

The judge prefers word i to word j with probability sigmoid(s_i - s_j) (Bradley and Terry 1952). What DPO learns from
these verdicts is compared with the true strengths, and with the strengths of maximum likelihood, fitted to the same
verdicts without a model: the rewards beta log(pi / pi_ref) of the words should equal them, up to a constant. The words
have three to nine letters, one token each, so a loss that confuses better with longer or shorter is noticed. The
problem that a seed draws is the verdicts; the strengths behind them are always the same.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, PreTrainedTokenizerFast

import trlx_like
from examples import configurations
from examples.problems import add_options, draws, summary

STRENGTHS = {"fig": 0.6, "pineapple": -0.6, "plum": -1.8, "blueberry": 1.8, "apple": -1.2, "orange": 0.0, "pear": 1.2}
PROMPT = "best: "
UNPAIRED = ("kto", "apo_zero_unpaired")
"""Losses of KTO, which sees single words and not which words were compared."""
VERDICTS = 150
"""Number of verdicts on each pair of words. The spacing of .6 is then four to five standard errors."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter."""
    letters = sorted({letter for word in [PROMPT, *STRENGTHS] for letter in word})
    made = Tokenizer(models.WordLevel({token: row for row, token in enumerate(["<eos>", *letters])}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def model_config() -> PretrainedConfig:
    """Configure a GPT-2 with 30 thousand random weights."""
    return GPT2Config(
        vocab_size=len(tokenizer()), n_layer=2, n_head=2, n_embd=32, n_positions=24, eos_token_id=0, bos_token_id=0
    )


def preferences(seed: int = 1000) -> list[dict[str, str]]:
    """Return the judge's verdicts on every pair of words."""
    rng = random.Random(seed)
    rows = []
    for first, second in combinations(STRENGTHS, 2):
        wins = torch.tensor(STRENGTHS[first] - STRENGTHS[second]).sigmoid().item()
        for _ in range(VERDICTS):
            chosen, rejected = (first, second) if rng.random() < wins else (second, first)
            rows.append({"prompt": PROMPT, "chosen": chosen, "rejected": rejected})
    return rows


def labelled(rows: Sequence[Mapping[str, str]] | None = None) -> list[dict[str, Any]]:
    """Return verdicts, by default those of `preferences`, as single words: one was liked and the other disliked."""
    labels = {"chosen": True, "rejected": False}
    return [
        {"prompt": PROMPT, "completion": row[side], "label": label}
        for row in (preferences() if rows is None else rows)
        for side, label in labels.items()
    ]


def most_likely(rows: list[dict[str, str]]) -> dict[str, float]:
    """Fit the strengths of highest likelihood, with mean 0, by Zermelo's iteration (1929)."""
    wins = {word: sum(row["chosen"] == word for row in rows) for word in STRENGTHS}
    strength = dict.fromkeys(STRENGTHS, 1.0)
    for _ in range(500):
        for word in STRENGTHS:
            others = [other for other in STRENGTHS if other != word]
            strength[word] = wins[word] / sum(VERDICTS / (strength[word] + strength[other]) for other in others)
    return centred({word: torch.tensor(value).log().item() for word, value in strength.items()})


def centred(values: dict[str, float]) -> dict[str, float]:
    mean = sum(values.values()) / len(values)
    return {word: value - mean for word, value in values.items()}


@torch.no_grad()
def log_probability(lm: Any, word: str) -> float:
    """Return the log-probability of a word and EOS after the prompt."""
    before, after = (tokenizer()(text).input_ids for text in (PROMPT, word))
    after = [*after, 0]
    logprobs = lm.eval()(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(dim=-1)
    return float(logprobs.gather(1, torch.tensor(after)[:, None]).sum())


def learn(
    seed: int, directory: Path, loss: str = "sigmoid", problem: int | None = None
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Train once; return the learned reward of each word, with mean 0, and the verdicts.

    problem: The seed of the verdicts; None for `seed`.
    """
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(model_config())
    reference = copy.deepcopy(lm)
    config = configurations.load("kto_bradley_terry" if loss in UNPAIRED else "dpo_bradley_terry").evolve(
        method={"loss_type": loss}, train={"seed": seed, "checkpoint_dir": str(directory)}
    )
    rows = preferences(seed if problem is None else problem)
    data: dict[str, Any] = {"samples": labelled(rows)} if loss in UNPAIRED else {"preferences": rows}
    trainer = trlx_like.train(config, **data, model_path=lm)
    lm.to("cpu")
    beta = trainer.method.beta
    ratios = {word: log_probability(lm, word) - log_probability(reference, word) for word in STRENGTHS}
    return centred({word: beta * ratio for word, ratio in ratios.items()}), rows


def separated(values: dict[str, float]) -> bool:
    """Tell whether every word that is better than the average has a higher reward than every worse one."""
    better, worse = ([values[word] for word in STRENGTHS if sign * STRENGTHS[word] > 0] for sign in (1, -1))
    return min(better) > max(worse)


def share_in_order(values: dict[str, float]) -> float:
    """Return the share of the 21 pairs of words of which the stronger one has the higher reward."""
    pairs = list(combinations(sorted(STRENGTHS, key=lambda word: STRENGTHS[word]), 2))
    return sum(values[weaker] < values[stronger] for weaker, stronger in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 1000, Path("runs/bradley_terry"), "judge's verdicts")
    parser.add_argument("--loss", default="sigmoid", help="method.loss_type of DPO or of KTO (default sigmoid)")
    arguments = parser.parse_args()
    words = sorted(STRENGTHS, key=lambda word: -STRENGTHS[word])
    lines = [["verdicts", *words, "order", "CPU s"], ["truth", *(f"{STRENGTHS[word]:+.2f}" for word in words), "", ""]]
    recovered, furthest, drawn, shares = 0, 0.0, draws(arguments), []
    for draw in drawn:
        started = time.process_time()
        rewards, rows = learn(draw.seed, draw.directory, arguments.loss, draw.problem)
        spent = time.process_time() - started
        likely = most_likely(rows)
        shares.append(share_in_order(rewards))
        right = separated(rewards) if arguments.loss in UNPAIRED else shares[-1] == 1
        recovered += right
        furthest = max(furthest, *(abs(rewards[word] - likely[word]) for word in words))
        cells = [f"{rewards[word]:+.2f}" for word in words]
        lines.append([str(draw.problem), *cells, "right" if right else "wrong", f"{spent:.0f}"])
        lines.append(["likeliest", *(f"{likely[word]:+.2f}" for word in words), "", ""])
    print()
    for line in lines:
        print("".join(cell.rjust(11) for cell in line))
    found = "better and worse words told apart" if arguments.loss in UNPAIRED else "order recovered"
    print(f"\n{found} in {recovered} of {arguments.seeds} runs", end="")
    print(f"; furthest from the likeliest strengths: {furthest:.2f}" if arguments.loss == "sigmoid" else "")
    print(f"pairs of words in order: {summary(drawn, shares)}")


if __name__ == "__main__":
    main()
