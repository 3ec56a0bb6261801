"""What a run leaves behind loads without this library, and says what the policy said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.contract.recipes import GENERATED, RECIPES, checks, few, kinds, make

language = {key: kind for key, kind in kinds().items() if RECIPES[kind[0]].loads_as is not None}


@pytest.mark.parametrize("kind", few(language, kept=(*RECIPES, "ILQLTrainer-seq2seq", "PPOTrainer-seq2seq")))
def test_plain_transformers_load_every_export(kind: str) -> None:
    """Each checkpoint's `hf_model`, the best one's, and a folder of one's own, loaded without a complaint."""
    name, changes = language[kind]
    recipe = RECIPES[name]
    options: dict[str, Any] = {}
    if recipe.evaluated == GENERATED:
        count = itertools.count()
        options = {"train.best_metric": "metrics/evaluations", "metric_fn": lambda: {"evaluations": next(count)}}
    compared = checks(name, **changes, **options).export(recipe.loads_as)
    assert "best_checkpoint" in compared and any(folder.startswith("checkpoint_") for folder in compared)


policies = [name for name, recipe in RECIPES.items() if recipe.loads_as is AutoModelForCausalLM]


@pytest.mark.parametrize("name", policies)
def test_every_policy_is_a_start_for_ppo(name: str, tmp_path: Path) -> None:
    """With heads of another algorithm beside it or without: the same weights, and a reference that equals them."""
    trainer = make(name, tmp_path / "before", **{"train.total_steps": 2})
    trainer.learn()
    trainer.save_pretrained(tmp_path / "export")
    start = {"model.model_path": str(tmp_path / "export"), "tokenizer.tokenizer_path": None, "train.total_steps": 1}
    ppo = make("PPOTrainer", tmp_path / "ppo", **start)
    for weight, value in trainer.model.lm.state_dict().items():
        assert torch.equal(ppo.model.lm.state_dict()[weight], value), weight
    assert ppo.learn()["policy/kl"] == 0
