"""Pipelines of diffusers behind one interface: against their own calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import tiny_pipelines
from trlx_like.errors import ConfigError
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.pipelines.captions import Captions, read_captions
from trlx_like.samplers.diffusion import EncodedPrompts

CPU = torch.device("cpu")
KINDS = {"sd": tiny_pipelines.sd, "sdxl": tiny_pipelines.sdxl, "sd3": tiny_pipelines.sd3}


def encoded(model: DiffusionModel, captions: Captions, negative: str | None = None) -> Any:
    return EncodedPrompts(model, negative, guidance=True)(captions)


class Halves(nn.Module):
    """A denoising model that says something else to the negative prompt, by a weight of its own for it."""

    def __init__(self) -> None:
        super().__init__()
        self.negative, self.positive = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, times: Tensor, encoder_hidden_states: Tensor, return_dict: bool) -> tuple[Tensor]:
        negative, positive = x.chunk(2)
        return (torch.cat([self.negative * negative, self.positive * positive]),)


def test_gradient_of_guidance() -> None:
    """w = 5: u + 5 (c - u), so d/dc = 5 and d/du = -4, or 0 where it is not to be learned."""
    model = DiffusionModel(tiny_pipelines.sd())
    prompts = encoded(model, read_captions(["a"]))
    model.denoiser = Halves()
    x = torch.ones(1, 4, 4, 4)
    for through, expected in ((True, -4.0), (False, 0.0)):
        model.denoiser.zero_grad(set_to_none=False)
        model.denoiser.negative.grad = model.denoiser.positive.grad = None
        guided, plain = model(x, torch.tensor([1]), prompts, 5.0, through_negative=through)
        assert guided[0, 0, 0, 0] == 7
        assert plain[0, 0, 0, 0] == 3
        guided.mean().backward()
        assert model.denoiser.positive.grad == 5
        assert (0 if model.denoiser.negative.grad is None else model.denoiser.negative.grad) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_all_that_is_trained_and_saved(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = DiffusionModel(KINDS[kind]())
    with caplog.at_level(logging.INFO):
        model.add_adapter({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in names)
    assert names
    assert {name.split(".lora")[0].rpartition("attn")[2].partition(".")[2] for name in names} == {
        *("to_q", "to_k", "to_v", "to_out.0")
    }
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    assert set(model.state_dict()) == {*names, *buffers}
    model.load_state_dict(model.state_dict())
    adapters: Any = model.denoiser.peft_config
    saved = adapters["default"].target_modules
    assert len(saved) > 3 and saved == sorted(saved)  # of a set each process would write another order
    assert f"Training an adapter: {sum(p.numel() for p in model.parameters() if p.requires_grad)} of" in caplog.text
    with pytest.raises(ConfigError, match="has an adapter already"):
        model.add_adapter({"peft_type": "LORA"})


def test_the_reference_is_the_model_at_the_start() -> None:
    for adapter in (None, {"peft_type": "LORA", "init_lora_weights": False}):
        model = DiffusionModel(tiny_pipelines.sd())
        if adapter:
            model.add_adapter(adapter)
        model.add_reference()
        prompts = encoded(model, read_captions(["a"]))
        x, t = torch.randn(1, 4, 4, 4), torch.tensor([3])
        before = model(x, t, prompts, 3.0)
        assert all(map(torch.equal, model.reference(x, t, prompts, 3.0), before))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
        assert all(map(torch.equal, model.reference(x, t, prompts, 3.0), before))
        assert not torch.equal(model(x, t, prompts, 3.0)[0], before[0])


def test_number_formats() -> None:
    """What is trained is float32; what is not is cast, but for a VAE that would overflow."""
    for dtype, of_vae in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = DiffusionModel(tiny_pipelines.sdxl())
        model.place(CPU, dtype)
        pipeline = model.pipeline
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert pipeline.text_encoder.dtype == pipeline.text_encoder_2.dtype == dtype
        assert pipeline.vae.dtype == of_vae
    model = DiffusionModel(tiny_pipelines.sd())
    model.add_adapter({"peft_type": "LORA"})
    model.place(CPU, torch.bfloat16)
    assert model.pipeline.vae.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    images = model.decode(torch.randn(2, 4, 4, 4))
    assert images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1


def test_a_pipeline_without_a_vae_makes_pixels() -> None:
    pipeline = tiny_pipelines.sd()
    pipeline.register_modules(vae=None)
    model = DiffusionModel(pipeline)
    assert (model.shape, model.size) == ((4, 4, 4), (4, 4))
    assert model.decode(torch.tensor([-1.0, 0.0, 1.0, 2.0]).reshape(1, 1, 2, 2)).flatten().tolist() == [0, 0.5, 1, 1]
