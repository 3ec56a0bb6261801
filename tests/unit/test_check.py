"""What `check` reads of a run that it does not make; tests/faults/hostile has what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.cli_support import TOKENS, TRAIN, ppo_file, said, write_yaml


def test_no_weight_is_read_and_no_function_called(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ppo_file(here)
    (here / "rewards.py").write_text("def score(outputs, **_):\n    raise SystemExit('called')\n")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("check trains nothing and asks nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(torch.nn.Embedding, "forward", refuse)
    assert said(0, "check", file).startswith("OK: ")


def test_a_model_of_the_hub_is_left_alone(here: Path) -> None:
    file = ppo_file(here)
    assert said(0, "check", file, "--set", "model.model_path=no/model").startswith("OK: PPOTrainer on no/model")


def test_the_first_row_goes_through_the_trainers_own_reading(here: Path) -> None:
    (here / "samples.jsonl").write_text('{"prompt": "a", "reply": "b"}\n')
    data = {"samples": "samples.jsonl"}
    train = {**TRAIN, "trainer": "SFTTrainer"}
    ppo_file(here)
    file = write_yaml(
        here / "sft.yml", model={"model_path": "model"}, train=train, method={"name": "SFTConfig", "gen_kwargs": TOKENS}
    )
    line = said(2, "check", file, "--set", f"data={data}")
    assert line == (
        "samples[0]: a dict needs 'prompt' and 'output' (or 'completion'); it has ['prompt', 'reply']. Name its "
        "columns in data.columns.\n"
    )
