"""Distillation by hand: its loss, recomputed in float64 from the next-token distributions of both models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.tiny import tiny_lm
from trlx_like.errors import ConfigError

POLICY = "model.model_path"
TEACHER = "model.ref_model_path"


def distribution(lm: Any, ids: list[int], temperature: float) -> Tensor:
    """The next-token probabilities after unpadded ids, in float64. [V]"""
    logits: Tensor = lm(torch.tensor([ids])).logits[0, -1].double()
    return (logits / temperature).softmax(dim=0)


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_the_loss_by_hand(kind: str, tmp_path: Path) -> None:
    """Responses are sampled at 0.7 from the 5 likeliest tokens; the loss is at 2.0, over the whole vocabulary."""
    policy, teacher = tiny_lm(seed=1, initializer_range=0.5), tiny_lm(seed=5, initializer_range=0.5)
    changes = {
        **{POLICY: policy, TEACHER: teacher, "method.divergence": kind, "method.loss_temperature": 2.0},
        **({"method.beta": 0.25} if kind == "jsd" else {}),
        "method.gen_kwargs": {"max_new_tokens": 6, "eos_token_id": [0, 4, 8], "temperature": 0.7, "top_k": 5},
    }
    trainer = make("DistillTrainer", tmp_path, **changes)
    trainer.make_experience()
    elements = trainer.store.elements
    lengths = [len(element.response) for element in elements]
    assert len(elements) == 7 and len(set(lengths)) > 1
    total = 0.0
    for element in elements:
        ids = element.prompt.tolist() + element.response.tolist()
        for end in range(len(element.prompt), len(ids)):
            p, q = (distribution(lm, ids[:end], 2.0) for lm in (trainer.model.lm, teacher))
            mixture = 0.25 * q + 0.75 * p
            jsd = 0.25 * kl(q, mixture) + 0.75 * kl(p, mixture)
            total += {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": jsd}[kind]
    batch = trainer.experience_class.collate(elements)
    assert trainer.units(batch) == sum(lengths)
    assert trainer.loss(batch).loss == pytest.approx(total, rel=1e-4)


def test_a_reward_function_is_not_needed(tmp_path: Path) -> None:
    trainer = make("DistillTrainer", tmp_path, reward_fn=None, eval_prompts=["ab"], **{"train.total_steps": 2})
    trainer.learn()
    first = rows(tmp_path)[1]
    assert first["rollout/samples"] > 0 and first["rollout/kept/fraction"] == 1 and first["losses/total_loss"] > 0
    names = {name for file in ("metrics.jsonl", "samples.jsonl") for row in rows(tmp_path, file) for name in row}
    assert "output" in names and not [name for name in names if "reward" in name or "score" in name]


def test_a_teacher_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.ref_model_path: is null; name the teacher"):
        make("DistillTrainer", tmp_path, **{TEACHER: None})


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """When both models are loaded, and already by `trlx-like check`, which reads no weights."""
    words = r"ref_model_path: the teacher has a vocabulary of 40 tokens and the policy one of 32\."
    other = tiny_lm(vocabulary=40)
    with pytest.raises(ConfigError, match=words):
        make("DistillTrainer", tmp_path, **{TEACHER: other})
    trainer = make("DistillTrainer", tmp_path)
    trainer.config.model.ref_model_path = other
    with pytest.raises(ConfigError, match=words):
        trainer.inspect_models()


def test_a_round_is_not_smaller_than_a_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.num_rollouts: 2 is less than a step's train.batch_size \(3\)"):
        make("DistillTrainer", tmp_path, **{"method.num_rollouts": 2})
