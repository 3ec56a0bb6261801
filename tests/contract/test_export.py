"""What a run leaves behind loads without this library, and says what the policy said."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.contract.recipes import GENERATED, LORA, RECIPES, checks, few, kinds, make
from tests.contract.runs import assert_same
from tests.tiny import tiny_lm

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


@pytest.mark.parametrize("name", few(policies, kept=("ILQLTrainer", "PPOTrainer", "SFTTrainer")))
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


@pytest.mark.parametrize("changes", [{}, {"model.peft_config": {**LORA, "target_modules": ["c_fc"]}}], ids=["", "lora"])
def test_weights_that_layers_share_undeclared(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file has them under each name, and the embeddings, whose tie to the head is declared, once."""

    def shared(folder: str) -> Any:
        lm: Any = tiny_lm()
        lm.transformer.h[1].mlp = lm.transformer.h[0].mlp
        return make("SFTTrainer", tmp_path / folder, **{"model.model_path": lm, "train.total_steps": 2, **changes})

    caplog.set_level(logging.INFO, logger="trlx_like")
    trainer = shared("run")
    trainer.learn()
    assert "4 weights that layers share are saved for each, such as transformer.h.1.mlp.c_fc.bias" in caplog.text
    folders = [*(tmp_path / "run").rglob("hf_model"), tmp_path / "export"]
    trainer.save_pretrained(folders[-1])
    ids = torch.arange(12).view(2, 6)
    expected = trainer.model.lm.eval()(ids).logits
    assert len(folders) > 1
    for folder in folders:
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
    again = shared("again")
    again.load(tmp_path / "run")
    assert_same(again.model.state_dict(), trainer.model.state_dict())
