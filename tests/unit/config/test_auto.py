"""Options that are `auto`: what the rules give, and how such an option is read and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.support import VALID, errors_of
from trlx_like.config.auto import AUTO, context_for, is_auto, responses_for
from trlx_like.config.methods.rft import RFTConfig
from trlx_like.config.train import TrainConfig


@pytest.mark.parametrize(("positions", "tokens"), [(64, 64), (1024, 1024), (131072, 1024), (None, 1024)])
def test_a_sequence_is_as_long_as_the_positions_up_to_a_bound(positions: int | None, tokens: int) -> None:
    assert context_for(positions) == tokens


@pytest.mark.parametrize(
    ("prompts", "responses"),
    [(1, 32), (16, 32), (17, 30), (64, 8), (128, 4), (129, 4), (10**6, 4), (None, 32), (0, 32)],
)
def test_few_prompts_get_more_responses_each(prompts: int | None, responses: int) -> None:
    """About 512 in all, while that is 4 to 32 for a prompt."""
    assert responses_for(prompts) == responses


def test_only_the_text_is_auto() -> None:
    assert is_auto(AUTO) and not any(map(is_auto, (None, 0, 1024, "Auto", "")))


def test_what_a_section_accepts() -> None:
    assert RFTConfig(n_generations_per_prompt=AUTO).n_generations_per_prompt == AUTO == "auto"
    assert RFTConfig(n_generations_per_prompt=3).n_generations_per_prompt == 3
    train: dict[str, Any] = {"trainer": "RFTTrainer", "total_steps": 1, "epochs": 1, "batch_size": 1}
    assert TrainConfig(**train).seq_length == AUTO and TrainConfig(**train, seq_length=9).seq_length == 9


@pytest.mark.parametrize(("given", "shown"), [("0", "0"), ("none", "'none'"), ("2.5", "2.5"), ("null", "null")])
def test_what_is_refused(given: str, shown: str, tmp_path: Path) -> None:
    (line,) = errors_of(tmp_path, VALID.replace("seq_length: 64", f"seq_length: {given}"))
    assert f"train.seq_length: must be a whole number of at least 1 or auto, got {shown}." in line
