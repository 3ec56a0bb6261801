"""Weights that are NaN or infinite are refused when a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import tiny_pipelines
from tests.tiny import tiny_config
from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.models.diffusion_families import load_pipeline
from trlx_like.models.finite import first_nonfinite
from trlx_like.models.loading import load_model
from trlx_like.models.reward_model import load_reward_model


def spoiled(model: Any, value: float = torch.nan) -> str:
    """Set one entry of the third parameter, and return its name."""
    name, parameter = list(model.named_parameters())[2]
    parameter.data.view(-1)[-1] = value
    return str(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_parameter_is_found(value: float, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config()).to(dtype)
    assert first_nonfinite(model) is None
    name = spoiled(model, value)
    assert first_nonfinite(model) == name


def test_large_weights_are_finite() -> None:
    assert first_nonfinite(torch.nn.ParameterList([torch.full((64,), 3e38)])) is None
    assert first_nonfinite(torch.nn.Module()) is None


def test_a_language_model_is_checked(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config())
    name = spoiled(model)
    model.save_pretrained(tmp_path)
    for path in (str(tmp_path), model):
        with pytest.raises(ConfigError, match=f"model.model_path .*: the weight {name} has NaN or infinite values"):
            load_model(path, ModelConfig(model_path=str(tmp_path)))


def test_a_reward_model_is_checked(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    name = spoiled(model, torch.inf)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"reward_fn .*: the weight {name} has NaN"):
        load_reward_model(str(tmp_path), trained=True, option="reward_fn")


def test_a_diffusion_pipeline_is_checked() -> None:
    folder = tiny_pipelines.saved("sd")
    pipeline = load_pipeline(ModelConfig(model_path=folder, model_arch_type="diffusion"))
    name = spoiled(pipeline.unet)
    with pytest.raises(ConfigError, match=f"UNet2DConditionModel.*: the weight {name} has NaN"):
        load_pipeline(ModelConfig(model_path=pipeline, model_arch_type="diffusion"))
