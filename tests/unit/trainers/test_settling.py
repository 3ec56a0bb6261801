"""Numbers in the place of `auto`: where they come from, and that the run's folder and a resume know them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import PROMPTS, make
from trlx_like import TRLConfig
from trlx_like.config.auto import is_auto
from trlx_like.errors import CheckpointError
from trlx_like.testing.tiny import tiny_gpt2
from trlx_like.trainers.settling import settled

RFT: dict[str, Any] = {"train.seq_length": "auto", "method.n_generations_per_prompt": "auto"}


def config_of(path: Any, **changes: Any) -> TRLConfig:
    train = {"trainer": "RFTTrainer", "total_steps": 1, "epochs": 1, "batch_size": 1}
    given = {"model": {"model_path": path}, "method": {"name": "RFTConfig"}, "train": train}
    return TRLConfig.update(given, changes)


def test_the_positions_are_those_of_the_model(tmp_path: Path) -> None:
    """In memory or in a folder; of what is not known the bound stays."""
    tiny_gpt2(n_positions=48).save_pretrained(tmp_path)
    for path in (tiny_gpt2(n_positions=48), str(tmp_path)):
        assert settled(config_of(path), {}).train.seq_length == 48
    for path in ("nobody/has-this", "package.module:function"):
        assert settled(config_of(path), {}).train.seq_length == 1024


def test_a_number_stays_and_the_given_configuration_too() -> None:
    given = config_of(tiny_gpt2(), **{"train.seq_length": 50})
    assert settled(given, {}) is given
    auto = config_of(tiny_gpt2(), **RFT)
    found = settled(auto, {"prompts": ["a"] * 100})
    assert (found.train.seq_length, found.method.to_dict()["n_generations_per_prompt"]) == (64, 5)
    assert is_auto(auto.train.seq_length)
    uncounted = settled(auto, {"prompts": (text for text in ["a"])})
    assert uncounted.method.to_dict()["n_generations_per_prompt"] == 32


def test_the_numbers_are_logged_written_and_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume with the same data finds the same numbers; with other data it is refused like any other number."""
    caplog.set_level(logging.INFO, "trlx_like")
    trainer = make("RFTTrainer", tmp_path, **RFT, **{"train.total_steps": 1})
    trainer.learn()
    words = "auto: train.seq_length is 64, method.n_generations_per_prompt is 32."
    assert words in caplog.messages
    text = (tmp_path / "config.yml").read_text()
    assert "seq_length: 64\n" in text and "n_generations_per_prompt: 32\n" in text and len(PROMPTS) < 16
    again = {**RFT, "train.total_steps": 2, "train.resume_from_checkpoint": "auto"}
    make("RFTTrainer", tmp_path, **again).learn()
    with pytest.raises(CheckpointError, match="method.n_generations_per_prompt"):
        make("RFTTrainer", tmp_path, **again, prompts=[f"a {number}" for number in range(32)]).learn()
