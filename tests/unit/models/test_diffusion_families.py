"""What model_path may be for images, and pipelines of other kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from torch import Tensor, nn

from tests import tiny_pipelines
from tests.tiny import tiny_config
from tests.unit.models.test_diffusion import encoded
from trlx_like import register_diffusion_family
from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.models.diffusion_families import FAMILIES, Family, StableDiffusion, load_pipeline
from trlx_like.pipelines.captions import read_captions


def config(path: Any, **more: Any) -> ModelConfig:
    return ModelConfig(model_path=path, model_arch_type="diffusion", **more)


def made() -> Any:
    return tiny_pipelines.sd()


class Mine(StableDiffusionPipeline):
    """One's own kind of a known one."""


def test_what_model_path_may_be() -> None:
    folder = load_pipeline(config(tiny_pipelines.saved("sd"), model_extra_configs={"variant": None}))
    assert isinstance(folder, StableDiffusionPipeline)
    assert isinstance(load_pipeline(config(f"{__file__}:made")), StableDiffusionPipeline)
    pipeline = made()
    assert load_pipeline(config(pipeline)) is pipeline
    own = Mine(**pipeline.components, requires_safety_checker=False)
    assert DiffusionModel(own).family.pipeline is own


def test_what_it_may_not_be(tmp_path: Any) -> None:
    pipeline = made()
    other = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    cases: dict[str, Any] = {
        r"StableDiffusionImg2ImgPipeline cannot be trained here; .* StableDiffusionPipeline,.* register_diff": other,
        r"model.model_path \('.*'\) is not a folder of diffusers": str(tmp_path),
        r"model.model_path \(GPT2Config\) must be a diffusers pipeline": tiny_config(),
        r"model.model_path: is a SimpleNamespace; give its .sd_pipeline": SimpleNamespace(sd_pipeline=pipeline),
    }
    for message, path in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_pipeline(config(path))
    assert isinstance(pipeline, DiffusionPipeline)
    model = DiffusionModel(pipeline)
    for message, given in {
        "diffusers can save and load LORA only": {"peft_type": "IA3", "feedforward_modules": []},
        "does not fit UNet2DConditionModel": {"peft_type": "LORA", "target_modules": ["nothing"]},
        "LORA has no such option. Did you mean lora_alpha": {"peft_type": "LORA", "lora_alfa": 1},
    }.items():
        with pytest.raises(ConfigError, match=message):
            model.add_adapter(given)


class Mask(nn.Module):
    """A model of a third party, which scales what it gets by a weight and adds what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=2, sample_size=(3, 5))
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        return self.weight * x + told


class TheirPipeline(DiffusionPipeline):
    register_modules: Any  # of a class that is made when diffusers is imported

    def __init__(self, painter: Mask, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(painter=painter, scheduler=scheduler)


class TheirSmallPipeline(TheirPipeline):
    pass


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))


def test_a_pipeline_of_another_kind_is_registered_with_how_it_is_called(families: None) -> None:
    pipeline = TheirSmallPipeline(Mask(), DDIMScheduler(timestep_spacing="trailing", clip_sample=False))
    with pytest.raises(ConfigError, match="TheirSmallPipeline cannot be trained here"):
        load_pipeline(config(pipeline))

    @register_diffusion_family("TheirPipeline")
    class Theirs(Family):
        part = "painter"

        def encode(self, prompts: list[str], negatives: list[str] | None, **options: Any) -> Any:
            lengths = torch.tensor([float(len(prompt)) for prompt in prompts])
            return lengths, 0 * lengths, None, None

        def predict(self, model: nn.Module, x: Tensor, times: Tensor, embeds: Tensor, pooled: Tensor | None) -> Tensor:
            output: Tensor = model(x, embeds[:, None, None, None])
            return output

    assert load_pipeline(config(pipeline)) is pipeline
    model = DiffusionModel(pipeline)
    assert model.shape == (2, 3, 5) and model.size == (3, 5)
    x = torch.ones(2, 2, 3, 5)
    output, plain = model(x, torch.tensor([1, 1]), encoded(model, read_captions(["abc", "a"])), 2.0)
    # Plain: .5 * 1 + 3 and + 1. Guided, away from 0: .5 + 2 (3.5 - .5) and .5 + 2 (1.5 - .5).
    assert plain[:, 0, 0, 0].tolist() == [3.5, 1.5]
    assert output[:, 0, 0, 0].tolist() == [6.5, 2.5]


def test_what_cannot_be_registered_is_said(families: None) -> None:
    with pytest.raises(RegistryError, match="register_diffusion_family needs a subclass of Family, got <class 'int'>"):
        register_diffusion_family("TheirPipeline")(int)  # type: ignore[type-var]
    register_diffusion_family("TheirPipeline")(StableDiffusion)
    with pytest.raises(RegistryError, match="'StableDiffusionXLPipeline' is taken by .*StableDiffusionXL"):
        register_diffusion_family("StableDiffusionXLPipeline")(StableDiffusion)
