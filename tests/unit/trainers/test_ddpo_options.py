"""Options of DDPO and settings of a pipeline's scheduler, in the trainer: each does what its page says."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from tests import tiny_pipelines
from tests.contract.recipes import make
from tests.unit.trainers.test_ddpo import batch_of, filled, gradients

NAME = "DDPOTrainer"
ZERO = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULERS: list[dict[str, Any]] = [
    *(
        {"prediction_type": prediction, "timestep_spacing": spacing, "steps_offset": offset}
        for prediction, spacing, offset in itertools.product(
            ("epsilon", "v_prediction", "sample"), ("leading", "trailing", "linspace"), (0, 1)
        )
    ),
    {"clip_sample": True},
    {"set_alpha_to_one": False, "steps_offset": 1},
    {**ZERO, "prediction_type": "v_prediction"},
    {**ZERO, "prediction_type": "sample"},
]


@pytest.mark.parametrize(
    "settings",
    [pytest.param(settings, marks=[pytest.mark.slow] * (at % 5 > 0)) for at, settings in enumerate(SCHEDULERS)],
    ids=lambda settings: "-".join(f"{value}" for value in settings.values()),
)
def test_every_scheduler_trains(settings: dict[str, Any], tmp_path: Path) -> None:
    """A round on each: nothing is NaN, as TRL's last step is with steps_offset 0, and what samples is what learns."""
    pipeline = tiny_pipelines.sd()
    # Behind the constructor's back, which turns steps_offset to 1 and clip_sample off.
    pipeline.scheduler = DDIMScheduler(**{"clip_sample": False, "beta_schedule": "scaled_linear", **settings})
    trainer = filled(tmp_path, **{"model.model_path": pipeline, "method.beta": 0.1})
    assert all(trainer.model.pipeline.scheduler.config[name] == value for name, value in settings.items())
    batch = batch_of(trainer)
    assert batch.latents.isfinite().all() and batch.old_logprobs.isfinite().all()
    first = trainer.optimize(batch)
    assert all(map(math.isfinite, first.values()))
    assert first["policy/ratio_deviation"] == 0 < first["grad_norm"]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert trainer.optimize(batch_of(trainer))["policy/ratio_deviation"] > 0


def test_options_reach_their_parts(tmp_path: Path) -> None:
    options = {
        "method.num_inference_steps": 4,
        "method.eta": 0.5,
        "method.guidance_scale": 3.0,
        "method.negative_prompt": "ab",
        "method.train_cfg": False,
        "method.guidance_gradient": False,
        "method.stat_buffer_size": 7,
        "method.stat_min_count": 5,
        "sampler.batch_size": 2,
    }
    quiet, plain = make(NAME, tmp_path, **options), make(NAME, tmp_path, **{"method.num_inference_steps": 4})
    sampler = quiet.sampler
    assert len(sampler.schedule) == 4 and torch.equal(sampler.schedule.stds, 0.5 * plain.sampler.schedule.stds)
    assert (sampler.guidance_scale, sampler.learn_guided, sampler.through_negative) == (3.0, False, False)
    assert (sampler.encoded.negative_prompt, sampler.batch_size) == ("ab", 2)
    assert (quiet.prompt_statistics.buffer_size, quiet.prompt_statistics.min_count) == (7, 5)
    flow = make(NAME, tmp_path, **{"model.model_path": tiny_pipelines.saved("sd3"), "method.noise_level": 0.35})
    usual = make(NAME, tmp_path, **{"model.model_path": tiny_pipelines.saved("sd3")})
    assert torch.allclose(flow.sampler.schedule.stds, 0.5 * usual.sampler.schedule.stds)


def test_what_is_said_to_the_negative_prompt_may_be_left_as_it_is(tmp_path: Path) -> None:
    """The policy is the same, its gradient is not; of the model without guidance it is another one again."""
    found = {}
    for name, changes in {
        "through both": {},
        "through one": {"method.guidance_gradient": False},
        "without": {"method.train_cfg": False},
    }.items():
        trainer = filled(tmp_path, **changes)
        found[name] = (batch_of(trainer).old_logprobs, torch.cat([g.flatten() for g in gradients(trainer)]))
    both, one, without = found.values()
    assert torch.equal(both[0], one[0]) and not torch.equal(both[0], without[0])
    assert float((both[1] - one[1]).norm()) > 0.01 * float(both[1].norm())
    assert float((both[1] - without[1]).norm()) > 0.01 * float(both[1].norm())


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    found = []
    saved: list[int] = []
    for wanted in (False, True):
        trainer = filled(tmp_path, **{"backend.gradient_checkpointing": wanted})
        assert trainer.model.denoiser.is_gradient_checkpointing == wanted
        kept: list[int] = []

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append(gradients(trainer))
            batch = next(iter(trainer.microbatches(batch_of(trainer))))
            kept.clear()
            trainer.model.train()
            trainer.loss(batch)
            saved.append(sum(kept))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    assert saved[1] < 0.7 * saved[0]


def test_images_are_decoded_one_at_a_time_or_together(tmp_path: Path) -> None:
    images = {}
    for wanted in (True, False):
        trainer = make(NAME, tmp_path, **{"method.vae_slicing": wanted})
        vae = trainer.model.pipeline.vae
        sizes: list[int] = []
        vae.decoder.register_forward_pre_hook(lambda module, given, sizes=sizes: sizes.append(len(given[0])))
        torch.manual_seed(0)
        images[wanted] = trainer.model.decode(torch.randn(3, *trainer.model.shape))
        assert sizes == ([1, 1, 1] if wanted else [3])
    torch.testing.assert_close(images[True], images[False], rtol=0, atol=1e-5)
