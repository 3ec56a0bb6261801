"""What a run on a pipeline of diffusers leaves behind loads without this library, and draws what the trainer drew."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.contract.images import PROMPTS
from tests.contract.recipes import RECIPES, make
from trlx_like import Callback

VARIANTS = {name: RECIPES["DDPOTrainer"].variants.get(name, {}) for name in ("sd", "adapter", "sdxl", "sd3")}


def images(pipeline: Any) -> torch.Tensor:
    """Of two prompts, by the pipeline's own call. [2, C, H, W]"""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "pt", "generator": generator}
    drawn: torch.Tensor = pipeline(PROMPTS[:2], **options).images
    return drawn


class Remember(Callback):
    """What the pipeline draws at each save, by the name of the checkpoint."""

    def __init__(self) -> None:
        self.images: dict[str, torch.Tensor] = {}

    def on_save(self, trainer: Any, directory: Path) -> None:
        self.images[directory.name] = images(trainer.model.pipeline)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_plain_diffusers_load_every_export(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each checkpoint's `hf_model`, the best one's, and of a LoRA also the whole pipeline with it added in."""
    remember = Remember()
    options = {"train.checkpoint_interval": 2, "train.eval_interval": 2, **changes}
    trainer = make("DDPOTrainer", tmp_path, **options, callbacks=[remember])
    trainer.learn()
    path = trainer.config.model.model_path
    first, *_, last = (name for name in remember.images if name.startswith("checkpoint_"))
    assert not torch.equal(remember.images[first], remember.images[last])
    with caplog.at_level(logging.WARNING):
        for folder, expected in remember.images.items():
            export = tmp_path / folder / "hf_model"
            if "model.peft_config" in changes:
                assert [file.name for file in export.iterdir()] == ["pytorch_lora_weights.safetensors"]
                loaded = DiffusionPipeline.from_pretrained(path)
                loaded.load_lora_weights(export)
            else:
                loaded = DiffusionPipeline.from_pretrained(export)
            # Not to the bit: in training images are decoded one at a time.
            torch.testing.assert_close(images(loaded), expected, rtol=0, atol=1e-6)
        if "model.peft_config" in changes:
            trainer.save_pretrained(tmp_path / "merged", merged=True)
            loaded = DiffusionPipeline.from_pretrained(tmp_path / "merged")
            torch.testing.assert_close(images(loaded), remember.images[last], rtol=0, atol=1e-5)
    # diffusers says of every LoRA without a part for the text encoders that it has none.
    assert not [record for record in caplog.messages if not record.startswith("No LoRA keys associated to CLIP")]
    assert not list(tmp_path.rglob("*.bin"))
