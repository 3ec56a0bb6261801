"""The sampler of images: against the pipelines' own calls, of any size, with each prompt encoded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from tests import tiny_pipelines
from tests.unit.models.test_diffusion import CPU, KINDS, encoded
from trlx_like.errors import ConfigError
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.pipelines.captions import read_captions
from trlx_like.samplers.diffusion import DiffusionSampler, EncodedPrompts
from trlx_like.samplers.schedules import DDIMSchedule, FlowSchedule, Schedule

CAPTIONS = ["a cat", "zz", "top"]


def certain(model: DiffusionModel, steps: int) -> Schedule:
    """A schedule that draws nothing."""
    scheduler = model.pipeline.scheduler
    return FlowSchedule(scheduler, steps, 0.0) if model.family.flow else DDIMSchedule(scheduler, steps, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("negative", [None, "b"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_are_those_of_the_pipelines_own_call(kind: str, negative: str | None, guidance: float) -> None:
    """Without noise in the steps: prompts, guidance, added conditions, steps and decoding are all as diffusers'."""
    pipeline = KINDS[kind]()
    if kind != "sd3":
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, clip_sample=False)
    pipeline.set_progress_bar_config(disable=True)
    model = DiffusionModel(pipeline)
    prompts = EncodedPrompts(model, negative, guidance=guidance > 1)
    sampler = DiffusionSampler(model, certain(model, 4), prompts, guidance_scale=guidance)
    drawn = sampler.sample(read_captions(CAPTIONS), CPU)
    options: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": guidance, "latents": drawn.latents[:, 0]}
    options |= {} if negative is None else {"negative_prompt": [negative] * 3}
    expected = pipeline(CAPTIONS, output_type="pt", **options).images
    torch.testing.assert_close(drawn.images, expected, rtol=0, atol=2e-5)
    assert drawn.latents.shape == (3, 5, 4, 4, 4)
    assert drawn.logprobs.tolist() == [[0] * 4] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_size(kind: str) -> None:
    model = DiffusionModel(KINDS[kind](), (12, 16))
    sampler = DiffusionSampler(model, certain(model, 2), EncodedPrompts(model, None, guidance=True), guidance_scale=2.0)
    drawn = sampler.sample(read_captions(CAPTIONS[:1]), CPU)
    assert drawn.images.shape == (1, 3, 12, 16)
    with pytest.raises(ConfigError, match=r"method.height \(13\) must be a multiple of 2"):
        DiffusionModel(KINDS[kind](), (13, None))


def test_each_prompt_may_lead_away_from_something_else() -> None:
    model = DiffusionModel(tiny_pipelines.sd())
    prompts = [{"prompt": "a", "negative_prompt": "z"}, "a", {"prompt": "a", "negative_prompt": "b"}]
    rows = encoded(model, read_captions(prompts), "b")
    assert torch.equal(rows.embeds[0], rows.embeds[1])
    assert torch.equal(rows.negative_embeds[1], rows.negative_embeds[2])
    assert not torch.equal(rows.negative_embeds[0], rows.negative_embeds[1])
    plain = encoded(model, read_captions(["a"]))
    torch.testing.assert_close(plain.negative_embeds, encoded(model, read_captions(["a"]), "").negative_embeds)


def test_known_prompts_are_encoded_once() -> None:
    model = DiffusionModel(tiny_pipelines.sd())
    calls: list[int] = []
    model.pipeline.text_encoder.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    known = EncodedPrompts(model, None, guidance=False)
    listed = read_captions([*CAPTIONS, "a cat"])
    known.remember([listed, read_captions(["zz"])])
    assert calls == [3]
    rows = known(listed)
    assert calls == [3]
    assert torch.equal(rows.embeds[0], rows.embeds[3])
    torch.testing.assert_close(known(read_captions(["a cat"])).embeds, rows.embeds[:1], rtol=0, atol=0)
    known(read_captions(["new", "zz", "new"]))
    assert calls == [3, 1]
