"""Generation by every trainer that generates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import GENERATED, PROMPTS, RECIPES, kinds, make

generating = {key: kind for key, kind in kinds().items() if RECIPES[kind[0]].evaluated == GENERATED}


@pytest.mark.parametrize(("name", "changes"), generating.values(), ids=generating)
def test_the_cache_is_kept_under_gradient_checkpointing(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """After the first, each pass reads one token: the prefix is not read again, although the model is in training."""
    trainer = make(name, tmp_path, **{**changes, "backend.gradient_checkpointing": True})
    widths: list[int] = []

    def look(module: Any, args: Any, given: Mapping[str, Any]) -> None:
        ids = given["decoder_input_ids"] if trainer.seq2seq else given["input_ids"]
        widths.append(ids.shape[1])

    trainer.model.train()
    assert any(getattr(part, "gradient_checkpointing", False) for part in trainer.model.lm.modules())
    handle = trainer.model.lm.register_forward_pre_hook(look, with_kwargs=True)
    for _ in range(2):  # neither when first nor when used before
        widths.clear()
        trainer.generate_eval(PROMPTS, max_new_tokens=5, eos_token_id=None)
        assert len(widths) == 5
        assert widths[1:] == [1] * 4
    handle.remove()
