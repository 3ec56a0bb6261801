"""The configuration for 10 GB. What an estimate is worth is shown by `tests/unit/test_estimate.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ddpo_memory import of_stable_diffusion
from trlx_like import TRLConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_stable_diffusion_with_a_lora_takes_less_than_10_gb() -> None:
    found = of_stable_diffusion(TRLConfig.load_yaml(ROOT / "configs" / "ddpo_sd15_lora.yml"))
    # UNet, CLIP's text part and VAE in bf16; the LoRA in float32.
    weights = 2 * (859_520_964 + 123_060_480 + 83_653_863) + 4 * 797_184
    assert found.table["load"]["weights"] == pytest.approx(weights, rel=1e-5)
    assert found.peak < 7e9
