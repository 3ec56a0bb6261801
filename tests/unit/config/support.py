"""Configurations in files and from Python, and what their errors say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError

VALID = """\
model:
  model_path: gpt2
train:
  total_steps: 10
  seq_length: 64
  epochs: 2
  batch_size: 8
  trainer: PPOTrainer
method:
  name: PPOConfig
"""


def errors_of(tmp_path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error, with the file called `x.yml`."""
    file = tmp_path / "x.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        TRLConfig.load_yaml(file, overrides)
    return str(error.value).replace(str(file), "x.yml").split("\n")


def loaded(tmp_path: Path, text: str, *overrides: str) -> TRLConfig:
    (tmp_path / "x.yml").write_text(text)
    return TRLConfig.load_yaml(tmp_path / "x.yml", overrides)


def sentence_of(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


TRAIN: dict[str, Any] = {"total_steps": 10, "seq_length": 64, "epochs": 2, "batch_size": 8, "trainer": "PPOTrainer"}
