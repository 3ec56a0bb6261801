"""Runs of every trainer of text on every family, with kept states and without: the SHA-256 of their weights."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.recipes import NO_DROPOUT, RECIPES, make
from tests.contract.test_trunk import STEADY, count_blocks
from tests.tiny import FAMILIES, ODD_FAMILIES, tiny_config
from trlx_like.testing.tiny import GENERATION

PROMPTS = list("abcdefgh")
ANSWERS = [
    *("a cat sat on a", "efghijklmnopqr", "the top of it.", "dada dab a dog"),
    *("bottoms up. zz", "ababababababab", "o.k. then o.k.", "qrstuvwxyz abc"),
]
"""With a prompt and the end of a text 16 tokens: the rounding of a product may depend on where its numbers lie in
memory. Prompts are so short that each answer is read behind its own."""
PAIRED = list(zip(PROMPTS, ANSWERS, ANSWERS[1:] + ANSWERS[:1], strict=True))
SAMPLES = list(zip(PROMPTS, ANSWERS, strict=True))
REWARDS = [1.0, -0.5, 0.0, 2.0, 0.3, 0.1, -1.0, 0.7]
SIZES: dict[str, Any] = {"num_rollouts": 8, "num_prompts": 4, "chunk_size": 4, "num_generations": 2}
LENGTHS = ("one length", "lengths that vary")
NOTHING_KEPT = ("DistillTrainer", "OnlineDPOTrainer", "RFTTrainer")
"""They read a sample in one pass a round."""


def of_one_length(name: str) -> dict[str, Any]:
    """Changes to a recipe by which all rows have the same length, and all batches the same size."""
    recipe = RECIPES[name]
    if "prompts" in recipe.arguments:
        given: dict[str, Any] = {"prompts": PROMPTS}
    elif "preferences" in recipe.arguments:
        given = {"preferences": PAIRED}
    else:
        given = {"samples": SAMPLES}
    if "rewards" in recipe.arguments:
        given["rewards"] = [True, False] * 4 if name == "KTOTrainer" else REWARDS
    held_out = {"eval_preferences": PAIRED} if "eval_preferences" in recipe.arguments else {"eval_prompts": PROMPTS}
    options = {key: value for key, value in SIZES.items() if key in recipe.method}
    if "gen_kwargs" in recipe.method:
        options["gen_kwargs"] = {**GENERATION, "max_new_tokens": 15, "min_new_tokens": 15}
    return {**given, **held_out, **{f"method.{key}": value for key, value in options.items()}, "train.batch_size": 4}


def digest(model: nn.Module) -> str:
    """The SHA-256 of all weights, in the order of their names."""
    found = hashlib.sha256()
    for name, held in sorted(model.state_dict().items()):
        found.update(name.encode() + held.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


QUICK = [("DPOTrainer", "gpt2", "one length"), ("RewardTrainer", "llama", "one length")]
NO_CLASSIFIER = ("cohere", "granite")
CASES = [
    case
    for case in product(RECIPES, FAMILIES + ODD_FAMILIES, LENGTHS)
    if case[0] != "DDPOTrainer" and not (case[0] == "RewardTrainer" and case[1] in NO_CLASSIFIER)
]


@pytest.mark.parametrize(
    ("name", "family", "lengths"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_weights_with_and_without_kept_states(name: str, family: str, lengths: str, tmp_path: Path) -> None:
    dropout = NO_DROPOUT if family == "gpt2" else {"dropout": 0.0} if "opt" in family else {}
    changes = {
        "model.num_layers_unfrozen": 1,
        "model.model_path": tiny_config(family, layers=3, **dropout),
        **(of_one_length(name) if lengths == "one length" else {}),
    }
    kept, plain = (
        make(name, tmp_path / word, **STEADY, **changes, **{"train.keep_trunk": word == "kept"})
        for word in ("kept", "plain")
    )
    first = [weight.detach().clone() for weight in plain.model.parameters()]
    start, ran = digest(plain.model), [count_blocks(trainer) for trainer in (kept, plain)]
    kept.learn()
    plain.learn()
    found, expected = digest(kept.model), digest(plain.model)
    assert start not in (found, expected)
    assert (kept.model.trunk is None) == (name in NOTHING_KEPT)
    assert kept.model.trunk is None or ran[0].total() < ran[1].total()
    if lengths == "one length" or name in NOTHING_KEPT:
        assert found == expected
    # Adam divides a gradient by its own size, so that rounding in one near 0 may move a weight by some 1e-6.
    for got, value, begun in zip(kept.model.parameters(), plain.model.parameters(), first, strict=True):
        assert (got - value).norm() <= 1e-4 * (value - begun).norm() + 1e-6
    same = "equal" if found == expected else "but for rounding"
    print(f"{name}, {family}, {lengths}: {found[:16]} and {expected[:16]}, {same}")
