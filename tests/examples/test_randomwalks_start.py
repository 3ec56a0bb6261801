"""ILQL to PPO on randomwalks: what is imitated between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.randomwalks import ilql_ppo
from examples.randomwalks.start import train_start
from examples.randomwalks.task import TOKENS, default_task
from tests.contract.recipes import make
from tests.contract.runs import rows


@pytest.fixture
def ilql(tmp_path: Path) -> Any:
    """A trainer that has learned nothing, of randomwalks' vocabulary."""
    changes = {
        "train.seq_length": 12,
        "method.gen_kwargs": {"max_new_tokens": 10, "top_k": 10},
        "model.model_path": "examples/randomwalks/task.py:model_config",
        "tokenizer.tokenizer_path": "examples/randomwalks/task.py:tokenizer",
    }
    return make(
        "ILQLTrainer", tmp_path / "ilql", samples=["ba", "cba"], rewards=[1.0, 0.5], eval_prompts=["b"], **changes
    )


def test_the_walks_to_imitate_are_guided_by_the_values(ilql: Any) -> None:
    """With values that want "k" more than anything else all walks go there, from each node 25 times."""
    with torch.no_grad():
        for target in ilql.values.targets:
            target.layers[2].bias[TOKENS.index("k")] += 100.0
    walks = ilql_ppo.guided_walks(ilql, default_task())
    assert sorted(start for start, _ in walks) == sorted(default_task().prompts * 25)
    assert {set(rest) == {"k"} for _, rest in walks} == {True}


def test_imitation_starts_from_the_export(ilql: Any, tmp_path: Path) -> None:
    """A model that says "k" has little to learn from walks of k's; random weights have more."""
    lm = ilql.model.lm
    with torch.no_grad():
        lm.transformer.ln_f.weight.zero_()
        lm.transformer.ln_f.bias.copy_(100 * lm.transformer.wte.weight[TOKENS.index("k")])
    ilql.save_pretrained(tmp_path / "export")
    losses = {}
    for name, model in {"export": tmp_path / "export", "random": None}.items():
        train_start(tmp_path / name, [("b", "kkkkkkkkk")] * 100, model, total_steps=1)
        losses[name] = rows(tmp_path / name)[1]["losses/total_loss"]
    assert losses["export"] < 0.5 * losses["random"], losses
