"""KTO by hand: its loss and its estimate of the KL divergence, recomputed from the models' probabilities in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.tiny import tiny_lm, tiny_tokenizer
from trlx_like.errors import ConfigError, DataError
from trlx_like.pipelines import given, prepared
from trlx_like.pipelines.forms import reward_of
from trlx_like.trainers import kto
from trlx_like.trainers.kto import labels_in, labels_of, mismatches

SAMPLES = [("ab", "c"), ("the", "dog"), ("z", "zz top")]
LABELS = [True, False, True]


def log_ratio(policy: Any, reference: Any, prompt: list[int], completion: list[int]) -> float:
    """Sum log pi - log pi_ref over the tokens of a completion, one token at a time."""
    total = 0.0
    for end in range(len(completion)):
        ids = torch.tensor([prompt + completion[:end]])
        new, old = (lm.double()(ids).logits[0, -1].softmax(dim=0)[completion[end]].item() for lm in (policy, reference))
        total += math.log(new) - math.log(old)
    return total


@torch.no_grad()
@pytest.mark.parametrize(("kind", "weights"), [("kto", (1.0, 1.0)), ("kto", (0.5, 2.0)), ("apo_zero_unpaired", (1, 1))])
@pytest.mark.parametrize("seed", [5, 6])
def test_the_loss_by_hand(kind: str, weights: tuple[float, float], seed: int, tmp_path: Path) -> None:
    """The reference is another model, so that log-ratios are not 0; with one of the seeds the estimate is below 0."""
    policy, reference = tiny_lm(seed=seed, vocabulary=32), tiny_lm(seed=11 - seed, vocabulary=32)
    changes = {
        **{"method.beta": 0.5, "method.loss_type": kind, "train.batch_size": 3, "train.minibatch_size": 1},
        **{"method.desirable_weight": weights[0], "method.undesirable_weight": weights[1]},
        **{"model.model_path": policy, "model.ref_model_path": reference, "samples": SAMPLES, "rewards": LABELS},
    }
    trainer = make("KTOTrainer", tmp_path, **changes)
    trainer.make_experience()
    with torch.enable_grad():
        trainer.accept = lambda metrics: False
        metrics = trainer.optimize(trainer.experience_class.collate(trainer.store.elements))
    ids = [[trainer.tokenizer(text).input_ids for text in sample] for sample in SAMPLES]
    encoded = [(prompt, [*completion, 0]) for prompt, completion in ids]  # each completion ends with EOS
    models = trainer.model.lm, reference
    own = [0.5 * log_ratio(*models, *sample) for sample in encoded]
    other = [log_ratio(*models, encoded[row][0], encoded[(row + 1) % 3][1]) for row in range(3)]
    kl = max(0.0, sum(other) / 3) if kind == "kto" else 0.0
    signs = [1 if good else -1 for good in LABELS]
    values = [1 / (1 + math.exp(-(reward - 0.5 * kl) * sign)) for reward, sign in zip(own, signs, strict=True)]
    losses = [weights[sign < 0] * (1 - value) for value, sign in zip(values, signs, strict=True)]
    assert metrics["losses/total_loss"] == pytest.approx(sum(losses) / 3, abs=1e-5)
    assert metrics["kl"] == pytest.approx(kl, abs=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx((own[0] + own[2]) / 2, abs=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(own[1], abs=1e-5)
    assert (kl > 0) == (kind == "kto" and seed == POSITIVE)


POSITIVE = 6
"""The seed whose estimate is above 0. The log-ratios of the other are its negatives, up to the tokens."""


def test_completions_come_from_the_next_sample_with_another_prompt() -> None:
    """By hand: a b b c a, where the last and the first have the same prompt; the b's take the completion of c."""
    assert mismatches("abbca") == [1, 3, 3, 4, 1]
    assert sorted(mismatches("aaa")) == [0, 1, 2]


def test_labels() -> None:
    assert labels_of([True, False, 1.0, 0, -2.5], 5) == [True, False, True, False, False]
    with pytest.raises(DataError, match="rewards has 1 entries for 2 samples"):
        labels_of([True], 2)
    with pytest.raises(DataError, match=r"rewards\[1\] is 'yes'; give a finite number"):
        labels_of([True, "yes"], 2)
    with pytest.raises(DataError, match=r"rewards: row 1 has [[]1.0, 2.0[]]; a label is true or false"):
        labels_of([True, [1.0, 2.0]], 2)


def test_labels_may_stand_in_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": c, "label": label} for (p, c), label in zip(SAMPLES, LABELS, strict=True)]
    trainer = make("KTOTrainer", tmp_path, samples=rows, rewards=None)
    assert labels_in(trainer.dialogues).tolist() == LABELS


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_in_rows_are_read_when_the_rows_are_encoded(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start asks the first row alone, whether there are any. Samples that are cut keep their labels."""
    read: list[Any] = []

    def watched(row: Any) -> Any:
        read.append(row)
        return reward_of(row)

    for module in (given, kto):
        monkeypatch.setattr(module, "reward_of", watched)
    monkeypatch.setattr(prepared, "FEWEST", 1)
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer := tiny_tokenizer(), "truncation_side", side)
    samples = [{"prompt": "ab", "completion": "cdefgh" * 2, "label": n} for n in (True, False, True)]
    options = {"rewards": None, "tokenizer": tokenizer, "train.seq_length": 8}

    def labels(rows: Any) -> list[bool]:
        read.clear()
        trainer = make("KTOTrainer", tmp_path, samples=rows, eval_samples=rows[:2], **options)
        assert all(trainer.dialogues.values("lost").reshape(-1, 2).any(1))
        assert labels_in(trainer.held_out_dialogues[0]).tolist() == labels_in(trainer.dialogues).tolist()[:2]
        return labels_in(trainer.dialogues).tolist()

    assert labels(samples) == [True, False, True] and len(read) == 1 + 3 + 2
    assert labels(samples) == [True, False, True] and len(read) == 1
    assert labels([*samples[:2], {**samples[2], "label": False}]) == [True, False, False]
    for _ in range(2):
        with pytest.raises(DataError, match=r"^rewards: row 1 has none; a label is true or false"):
            labels([samples[0], {"prompt": "ab", "completion": "c"}, samples[2]])


def test_held_out_samples_are_measured_as_those_of_training(tmp_path: Path) -> None:
    """The evaluation before the only step has the numbers of that step, its estimate of the KL divergence too."""
    given = [{"prompt": p, "completion": c, "label": label} for (p, c), label in zip(SAMPLES, LABELS, strict=True)]
    changes = {"model.ref_model_path": tiny_lm(seed=5, vocabulary=32), "train.batch_size": 3, "train.total_steps": 1}
    trainer = make("KTOTrainer", tmp_path, samples=SAMPLES, rewards=LABELS, eval_samples=given, **changes)
    trainer.learn()
    before, step, *_ = rows(tmp_path)
    names = ["losses/total_loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins"]
    assert {f"eval/{name}": before[f"eval/{name}"] for name in names} == pytest.approx(
        {f"eval/{name}": step[name] for name in names}, abs=1e-5
    )
    assert step["rewards/margins"] != 0
    split = make("KTOTrainer", tmp_path, samples=given, rewards=None, **{"data.eval_split": 0.34})
    assert (len(split.dialogues), len(split.held_out[""])) == (2, 1)
    with pytest.raises(DataError, match=r"^the labels of eval_samples: row 1 has none; a label is true or false"):
        make("KTOTrainer", tmp_path, eval_samples=[given[0], SAMPLES[1]])


def test_a_completion_of_another_prompt_is_cut_to_the_room_that_is_left(tmp_path: Path) -> None:
    samples = [("abcdefgh", "i"), ("z", "abcdefg")]
    trainer = make("KTOTrainer", tmp_path, samples=samples, rewards=[True, False], **{"train.seq_length": 10})
    trainer.make_experience()
    first, second = trainer.store.elements
    assert (len(first.prompt), len(first.other)) == (8, 2)
    assert (len(second.prompt), second.other.tolist()) == (1, first.response.tolist())


def test_weights_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    nothing = {"method.desirable_weight": 0.0, "method.undesirable_weight": 0.0}
    with pytest.raises(ConfigError, match=r"method.undesirable_weight: 0 does not go with method.desirable_weight 0"):
        make("KTOTrainer", tmp_path, **nothing)
