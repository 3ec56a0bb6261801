"""DPOTrainer's losses and metrics, against plain transformers on one unpadded row at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import NO_DROPOUT, make
from tests.tiny import tiny_lm
from tests.unit.functional import preference_numpy as twin
from trlx_like.config.methods.dpo import LOSSES
from trlx_like.data import PreferenceExperience
from trlx_like.trainers.dpo import DPOTrainer
from trlx_like.trainers.dpo_losses import FORMULAS

BETA = 0.5
E = 0.1
PLAIN: dict[str, Any] = {"method.loss_type": "sigmoid", "method.loss_weights": None, "train.max_grad_norm": None}
WHOLE = {"train.batch_size": 5}
TEXTS = [  # of PREFERENCES: prompt, chosen, rejected; the third has no prompt but what both begin with
    ("ab", " cd", "e"),
    ("the cat", " sat.", " flew away"),
    ("zz ", "top.", "bottom"),
    ("b", "bcd", "efghijk"),
    ("abcdefg", "h", "x y z"),
]


def moved(trainer: DPOTrainer, scale: float = 0.05) -> DPOTrainer:
    """With other weights than the reference's, so that nothing is 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.lm.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return trainer


def logprobs_of(lm: Any, trainer: DPOTrainer, prompt: str, completion: str) -> list[float]:
    """Of each token of a completion and its EOS, by plain transformers on one unpadded row."""
    tokenizer = trainer.tokenizer
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    after = [*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    with torch.no_grad():
        logits = lm.eval()(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    table = logits.double().log_softmax(dim=-1)
    return [float(table[place, token]) for place, token in enumerate(after)]


class Known:
    """Log-probabilities of all pairs under a policy and its reference, as lists of numbers of tokens."""

    def __init__(self, trainer: DPOTrainer, policy: Any, reference: Any) -> None:
        def side(lm: Any, which: int) -> list[list[float]]:
            return [logprobs_of(lm, trainer, texts[0], texts[which]) for texts in TEXTS]

        self.chosen, self.rejected = side(policy, 1), side(policy, 2)
        self.ref_chosen, self.ref_rejected = side(reference, 1), side(reference, 2)

    def ratios(self) -> list[tuple[float, float]]:
        columns = zip(self.chosen, self.ref_chosen, self.rejected, self.ref_rejected, strict=True)
        return [(sum(c) - sum(rc), sum(r) - sum(rr)) for c, rc, r, rr in columns]

    def rewards(self) -> list[tuple[float, float]]:
        return [(BETA * c, BETA * r) for c, r in self.ratios()]

    def margins(self) -> list[float]:
        return [c - r for c, r in self.rewards()]

    def per_token(self) -> list[float]:
        lengths = zip(self.chosen, self.rejected, strict=True)
        return [d[0] / len(c) - d[1] / len(r) for d, (c, r) in zip(self.ratios(), lengths, strict=True)]

    def sorted_differences(self, better: list[float], worse: list[float]) -> list[float]:
        return [BETA * (b - w) for b, w in zip(sorted(better), sorted(worse), strict=True)]


def aot(known: Known) -> list[float]:
    policy = [sum(c) - sum(r) for c, r in zip(known.chosen, known.rejected, strict=True)]
    reference = [sum(c) - sum(r) for c, r in zip(known.ref_chosen, known.ref_rejected, strict=True)]
    return known.sorted_differences(policy, reference)


def aot_unpaired(known: Known) -> list[float]:
    return known.sorted_differences([c for c, _ in known.ratios()], [r for _, r in known.ratios()])


def sft(known: Known) -> list[float]:
    tokens = [logprob for row in known.chosen for logprob in row]
    return [-sum(tokens) / len(tokens)]


EXPECTED: dict[str, Callable[[Known], list[float]]] = {
    "sigmoid": lambda k: [twin.smoothed(m, E) for m in k.margins()],
    "sigmoid_norm": lambda k: [twin.smoothed(BETA * m, E) for m in k.per_token()],
    "hinge": lambda k: [max(0.0, 1 - m) for m in k.margins()],
    "ipo": lambda k: [(m - 1 / (2 * BETA)) ** 2 for m in k.per_token()],
    "exo_pair": lambda k: [twin.exo_pair(m, E) for m in k.margins()],
    "robust": lambda k: [twin.robust(m, E) for m in k.margins()],
    "discopop": lambda k: [twin.discopop(m, 0.05) for m in k.margins()],
    "nca_pair": lambda k: [twin.nca_pair(c, r) for c, r in k.rewards()],
    "bco_pair": lambda k: [twin.bco_pair(c, r) for c, r in k.rewards()],
    "sppo_hard": lambda k: [(c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2 for c, r in k.ratios()],
    "apo_zero": lambda k: [twin.LOSSES["apo_zero"][0](c, r) for c, r in k.rewards()],
    "apo_down": lambda k: [twin.LOSSES["apo_down"][0](c, r) for c, r in k.rewards()],
    "aot": lambda k: [twin.smoothed(m, E) for m in aot(k)],
    "aot_unpaired": lambda k: [twin.smoothed(m, E) for m in aot_unpaired(k)],
    "sft": sft,
}


def step(trainer: DPOTrainer) -> dict[str, float]:
    """One step on all pairs, from experience made before the policy moved."""
    trainer.make_experience()
    moved(trainer)
    return trainer.optimize(PreferenceExperience.collate(trainer.store.elements))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_loss_is_that_of_plain_transformers(family: str, tmp_path: Path) -> None:
    assert set(EXPECTED) == set(LOSSES) == {*FORMULAS, "sft"}
    weights = [0.1 * (1 + row) for row in range(len(LOSSES))]
    changes = {"method.loss_type": list(LOSSES), "method.loss_weights": weights, "method.label_smoothing": E}
    lm = tiny_lm(family, **NO_DROPOUT if family == "gpt2" else {})
    reference = copy.deepcopy(lm)
    # Held still: the gradient is not what is looked at here.
    trainer = make(
        "DPOTrainer", tmp_path, **WHOLE, **changes, **{"model.model_path": lm, "optimizer.kwargs": {"lr": 0.0}}
    )
    metrics = step(trainer)
    known = Known(trainer, lm, reference)
    expected = {name: math.fsum(loss(known)) / len(loss(known)) for name, loss in EXPECTED.items()}
    for name, value in expected.items():
        assert metrics[f"losses/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    total = math.fsum(weight * expected[name] for name, weight in zip(LOSSES, weights, strict=True))
    assert metrics["losses/total_loss"] == pytest.approx(total, rel=1e-4)
    check_watched(metrics, known)


def check_watched(metrics: dict[str, float], known: Known) -> None:
    chosen, rejected = ([pair[side] for pair in known.rewards()] for side in (0, 1))
    assert metrics["rewards/chosen"] == pytest.approx(sum(chosen) / 5, abs=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(sum(rejected) / 5, abs=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(sum(known.margins()) / 5, abs=1e-5)
    assert metrics["rewards/accuracies"] == pytest.approx(sum(m > 0 for m in known.margins()) / 5)
    assert 0 < metrics["rewards/accuracies"] < 1
    assert metrics["logps/chosen"] == pytest.approx(sum(map(sum, known.chosen)) / 5, rel=1e-5)
    assert metrics["logps/rejected"] == pytest.approx(sum(map(sum, known.rejected)) / 5, rel=1e-5)


def test_what_is_looked_at_of_tokens(tmp_path: Path) -> None:
    """Means over tokens, however long the completions that they are of."""
    lm = tiny_lm(**NO_DROPOUT)
    trainer = make("DPOTrainer", tmp_path, **WHOLE, **{"model.model_path": lm, "optimizer.kwargs": {"lr": 0.0}})
    metrics = step(trainer)
    entropy: list[float] = []
    logits: dict[int, list[float]] = {1: [], 2: []}
    right: list[bool] = []
    for texts in TEXTS:
        for side in (1, 2):
            before = trainer.tokenizer(texts[0]).input_ids
            after = [*trainer.tokenizer(texts[side]).input_ids, trainer.tokenizer.eos_token_id]
            with torch.no_grad():
                table = lm.eval()(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].double()
            logits[side] += table.mean(dim=-1).tolist()
            entropy += torch.distributions.Categorical(logits=table).entropy().tolist()
            if side == 1:
                right += (table.argmax(dim=-1) == torch.tensor(after)).tolist()
    assert metrics["entropy"] == pytest.approx(sum(entropy) / len(entropy), rel=1e-5)
    assert metrics["logits/chosen"] == pytest.approx(sum(logits[1]) / len(logits[1]), abs=1e-5)
    assert metrics["logits/rejected"] == pytest.approx(sum(logits[2]) / len(logits[2]), abs=1e-5)
    assert metrics["mean_token_accuracy"] == pytest.approx(sum(right) / len(right))


def test_ld_alpha_weighs_what_is_longer(tmp_path: Path) -> None:
    lm = tiny_lm(**NO_DROPOUT)
    reference = copy.deepcopy(lm)
    changes = {**PLAIN, **WHOLE, "method.ld_alpha": 0.25, "model.model_path": lm, "optimizer.kwargs": {"lr": 0.0}}
    trainer = make("DPOTrainer", tmp_path, **changes)
    metrics = step(trainer)
    known = Known(trainer, lm, reference)
    margins = []
    for c, r, rc, rr in zip(known.chosen, known.rejected, known.ref_chosen, known.ref_rejected, strict=True):
        shared = min(len(c), len(r))
        total = [sum(row[:shared]) + 0.25 * sum(row[shared:]) for row in (c, r, rc, rr)]
        margins.append(BETA * (total[0] - total[2] - total[1] + total[3]))
    expected = sum(twin.LOSSES["sigmoid"][0](m) for m in margins) / 5
    assert metrics["losses/total_loss"] == pytest.approx(expected, rel=1e-5)


def test_weighting_by_what_the_policy_would_write(tmp_path: Path) -> None:
    lm = tiny_lm(**NO_DROPOUT)
    reference = copy.deepcopy(lm)
    changes = {**PLAIN, **WHOLE, "method.use_weighting": True, "model.model_path": lm, "optimizer.kwargs": {"lr": 0.0}}
    trainer = make("DPOTrainer", tmp_path, **changes)
    metrics = step(trainer)
    known = Known(trainer, lm, reference)
    total = 0.0
    for texts, margin in zip(TEXTS, known.margins(), strict=True):
        weight = 1.0
        for side in (1, 2):
            before = trainer.tokenizer(texts[0]).input_ids
            after = [*trainer.tokenizer(texts[side]).input_ids, trainer.tokenizer.eos_token_id]
            with torch.no_grad():
                logits = lm.eval()(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].double()
            p = logits.softmax(dim=-1)
            aligned = [float((p[t, token] / (p[t] ** 2).sum()).log()) for t, token in enumerate(after)]
            weight *= math.exp(sum(aligned) / len(aligned))
        total += weight * twin.LOSSES["sigmoid"][0](margin)
    assert metrics["losses/sigmoid"] == pytest.approx(total / 5, rel=1e-5)


def test_rpo_adds_the_likelihood_of_the_chosen_tokens(tmp_path: Path) -> None:
    both, rpo = (
        step(make("DPOTrainer", tmp_path, **WHOLE, **changes))
        for changes in (
            {"method.loss_type": ["sigmoid", "sft"], "method.loss_weights": [1.0, 0.7]},
            {"method.loss_type": "sigmoid", "method.loss_weights": None, "method.rpo_alpha": 0.7},
        )
    )
    assert rpo == both
