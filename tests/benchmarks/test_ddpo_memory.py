"""The estimate of DDPO's memory: on fake tensors it counts what real ones take; and the configuration for 10 GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ddpo_memory import Alive, become_fake, estimate, phases, prepared
from tests import tiny_pipelines
from tests.contract.recipes import LORA, make
from trlx_like import TRLConfig

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_alive_is_counted() -> None:
    """Storages, not views of them; and what is gone is not."""
    with Alive() as alive:
        kept = torch.zeros(100)
        views = [kept.view(10, 10), kept[3:]]
        torch.ones(1000)
        assert (alive.bytes, alive.most) == (400, 4400)
        double = kept * 2
        assert (alive.bytes, alive.most) == (800, 4400)
        del double, views
        assert alive.bytes == 400


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.peft_config": {**LORA, "r": 2}, "backend.mixed_precision": "bf16"},
        {"backend.gradient_checkpointing": True, "method.guidance_scale": 1.0, "train.minibatch_size": 3},
    ],
)
def test_fake_tensors_take_what_real_ones_take(changes: dict[str, Any], tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = make("DDPOTrainer", tmp_path).config
    for key, value in changes.items():
        section, name = key.split(".")
        config = config.evolve(**{section: {name: value}})
    real = phases(config, prepared(config, tiny_pipelines.sd, "cpu"))
    model = prepared(config, tiny_pipelines.sd, "meta")
    with FakeTensorMode():
        become_fake(model)
        fake = phases(config, model)
    assert fake == real
    assert min(fake.values()) > 1000


@pytest.mark.slow
def test_stable_diffusion_with_a_lora_takes_less_than_10_gb() -> None:
    config = TRLConfig.load_yaml(ROOT / "configs" / "ddpo_sd15_lora.yml")
    found = estimate(config)
    # UNet, CLIP's text part and VAE in bf16; the LoRA in float32.
    assert found["weights"] == pytest.approx(2 * (859_520_964 + 123_060_480 + 83_653_863) + 4 * 797_184, rel=1e-5)
    assert found["weights"] + found["learning"] < 6.5e9
