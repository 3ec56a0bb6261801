"""What a run leaves behind loads without this library, and says what the policy said."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from tests.contract.recipes import GENERATED, PROMPTS, RECIPES, kinds, make
from trlx_like import Callback
from trlx_like.models.loading import fuse_gelu


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    """Of all prompts. [B, T, V]"""
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        scores: torch.Tensor = model.eval()(**batch).logits
    return scores


class Remember(Callback):
    """Keeps the policy's logits as they are at each save, by the name of the checkpoint."""

    def __init__(self) -> None:
        self.scores: dict[str, torch.Tensor] = {}

    def on_save(self, trainer: Any, directory: Path) -> None:
        self.scores[directory.name] = logits(trainer.model.lm, trainer.tokenizer)


language = {key: kind for key, kind in kinds().items() if RECIPES[kind[0]].loads_as is not None}


@pytest.mark.parametrize(("name", "changes"), language.values(), ids=language)
def test_plain_transformers_load_every_export(
    name: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each checkpoint's `hf_model`, the best one's, and a folder of one's own, loaded without a complaint."""
    remember = Remember()
    recipe = RECIPES[name]
    options: dict[str, Any] = {"train.checkpoint_interval": 2, "train.eval_interval": 1}
    if recipe.evaluated == GENERATED:
        count = itertools.count()
        options |= {"train.best_metric": "metrics/evaluations", "metric_fn": lambda: {"evaluations": next(count)}}
    trainer = make(name, tmp_path, **changes, **options, callbacks=[remember])
    trainer.learn()
    expected = remember.scores
    trainer.save_pretrained(tmp_path / "own")
    expected["own"] = logits(trainer.model.lm, trainer.tokenizer)
    config = trainer.model.lm.config
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else recipe.loads_as
    first = next(folder for folder in expected if folder.startswith("checkpoint_"))
    assert "best_checkpoint" in expected
    for folder, scores in expected.items():
        path = tmp_path / folder if folder == "own" else tmp_path / folder / "hf_model"
        with caplog.at_level(logging.WARNING):
            model = kind.from_pretrained(path, attn_implementation=config._attn_implementation)  # to the bit
            tokenizer = AutoTokenizer.from_pretrained(path)
        assert not caplog.records
        torch.testing.assert_close(logits(fuse_gelu(model), tokenizer), scores, rtol=0, atol=0)
        assert tokenizer(PROMPTS).input_ids == trainer.tokenizer(PROMPTS).input_ids
        assert not list(path.glob("*.bin")) and not list(path.glob("*.pt"))
    assert not torch.equal(expected[first], expected["own"])


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
