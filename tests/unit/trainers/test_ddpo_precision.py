"""DDPO in half precision: what samples is what learns, log-probabilities are float32, and gradients survive fp16."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from tests import tiny_pipelines
from tests.contract.recipes import LORA, few, make
from tests.contract.runs import StopAfter, assert_same_run, rows, run_until_stopped
from tests.unit.trainers.test_ddpo import batch_of, filled
from trlx_like.errors import ConfigError

# A step that overflows comes before the optimiser's first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.usefixtures("number_format"),
]

NAME = "DDPOTrainer"
SMALL_LORA = {"model.peft_config": {**LORA, "r": 2}}
BF16, FP16 = ({"backend.mixed_precision": name} for name in ("bf16", "fp16"))
LOADED = {name: {"model.dtype": dtype} for name, dtype in {"bf16": "bfloat16", "fp16": "float16"}.items()}
HALF: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp16": FP16,
    "adapter in bf16": {**BF16, **SMALL_LORA},
    "adapter in fp16": {**FP16, **SMALL_LORA},
    "loaded in bf16": LOADED["bf16"],
    "adapter on a model loaded in fp16": {**LOADED["fp16"], **SMALL_LORA},
    "adapter in fp16 on a model loaded in it": {**FP16, **LOADED["fp16"], **SMALL_LORA},
    "sdxl in fp16": {**FP16, "model.model_path": tiny_pipelines.saved("sdxl")},
    "sd3 in bf16": {**BF16, "model.model_path": tiny_pipelines.saved("sd3")},
    "sd3 in fp16": {**FP16, "model.model_path": tiny_pipelines.saved("sd3")},
}
FORMATS = {
    "float32": {},
    "sdxl": {"model.model_path": tiny_pipelines.saved("sdxl")},
    "without guidance": {"method.guidance_scale": 1.0},
    "guided, learned without": {"method.train_cfg": False},
    "checkpointed": {"backend.gradient_checkpointing": True},
    "pixels": {"method.use_clipped_model_output": True},
    **HALF,
}


@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
def test_before_the_first_update_every_ratio_is_1(changes: dict[str, Any], tmp_path: Path) -> None:
    """Exactly, in half precision too: with a clip range of 1e-4 even rounding would be clipped away."""
    trainer = filled(tmp_path, **changes)
    batch = batch_of(trainer)
    assert batch.latents.dtype == batch.old_logprobs.dtype == torch.float32
    metrics = trainer.optimize(batch)
    assert metrics["policy/ratio_deviation"] == 0
    assert metrics["policy/clip_fraction"] == 0
    again = trainer.optimize(batch_of(trainer))
    assert again["policy/ratio_deviation"] > 0


QUICK = ("bf16", "adapter in fp16", "adapter on a model loaded in fp16", "sd3 in fp16")


@pytest.mark.parametrize("name", few(HALF, QUICK))
def test_a_run_in_half_precision(name: str, tmp_path: Path) -> None:
    """What computes is half, what is trained and what is scored is not; every number is finite, in every round."""
    trainer = make(NAME, tmp_path, **{"method.inner_epochs": 1, "method.beta": 0.1, **HALF[name]})
    seen: set[torch.dtype] = set()
    trainer.model.denoiser.register_forward_hook(lambda module, given, output: seen.add(output[0].dtype))
    scored: set[torch.dtype] = set()
    score = trainer.sampler.score

    def noting(*given: Any) -> Any:
        step = score(*given)
        scored.update({step.logprob.dtype, step.mean.dtype, step.std.dtype})
        return step

    trainer.sampler.score = noting
    before = [parameter.clone() for parameter in trainer.model.parameters() if parameter.requires_grad]
    trainer.learn()
    after = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    formats = {"bf16": {torch.bfloat16}, "fp16": {torch.float16}, "no": seen}
    assert seen == formats[trainer.config.backend.mixed_precision]
    assert scored == {torch.float32} == {parameter.dtype for parameter in after}
    assert all(parameter.isfinite().all() for parameter in after)
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    table = rows(tmp_path)
    numbers = [float(value) for row in table for name, value in row.items() if name != "grad_norm"]
    assert all(map(math.isfinite, numbers))  # the norm is not in a step that overflows, which is dropped
    fresh = [row["policy/ratio_deviation"] for row in table if "rollout/score_mean" in row]
    assert len(fresh) >= 2 and set(fresh) == {0}


# Gradient scaling.


def gradients(folder: Path, **changes: Any) -> torch.Tensor:
    """Of a small step, as the optimiser gets them."""
    trainer = filled(folder, **changes)
    for element in trainer.store.elements:
        element.advantages.fill_(1e-6)
    found: list[torch.Tensor] = []

    def look(metrics: Any) -> bool:
        found.extend(parameter.grad.flatten().clone() for parameter in trainer.model.parameters())
        return False

    trainer.accept = look
    trainer.optimize(batch_of(trainer))
    trainer.optimize(batch_of(trainer))  # one that was refused is no obstacle to the next
    one, two = torch.cat(found).chunk(2)
    assert torch.equal(one, two)
    return one


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_small_gradients_survive_fp16(max_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of float32 within its rounding, clipped or not. Without scaling many are 0: fp16 ends at 6e-8."""
    changes = {"train.max_grad_norm": max_norm}
    expected = gradients(tmp_path, **changes)
    AcceleratorState._reset_state(reset_partial_state=True)
    got = gradients(tmp_path, **FP16, **changes)
    assert float((got - expected).norm() / expected.norm()) < 0.02
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: torch.GradScaler(device, init_scale=1.0))
    unscaled = gradients(tmp_path, **FP16, **changes)
    lost = ((unscaled == 0) & (expected != 0)).float().mean()
    assert lost > 0.05 > 0.01 > ((got == 0) & (expected != 0)).float().mean()


def test_a_step_that_overflows_changes_nothing_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = filled(tmp_path, **FP16)
    assert "fp16 is slow on a CPU" in caplog.text
    trainer.accelerator.scaler.load_state_dict(
        {**trainer.accelerator.scaler.state_dict(), "scale": 2.0**40, "_growth_tracker": 0}
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with caplog.at_level(logging.WARNING):
        metrics = trainer.optimize(batch_of(trainer))
    assert not math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    message = f"overflowed in fp16 at a scale of {2.0**40:g}: this step changes nothing, and the scale is {2.0**39:g}"
    assert message in caplog.text
    while not math.isfinite(trainer.optimize(batch_of(trainer))["grad_norm"]):
        pass
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_a_resumed_run_in_fp16_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """The scale too."""
    auto = {"train.resume_from_checkpoint": "auto"}
    whole = make(NAME, tmp_path / "whole", **FP16, **SMALL_LORA, **auto)
    whole.learn()
    run_until_stopped(make(NAME, tmp_path / "parts", **FP16, **SMALL_LORA, callbacks=[StopAfter(3)]))
    resumed = make(NAME, tmp_path / "parts", **FP16, **SMALL_LORA, **auto)
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")


def test_a_second_number_format_in_a_process_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    make(NAME, tmp_path / "first")
    with pytest.raises(ConfigError, match=r"^backend\.mixed_precision \('bf16'\): AcceleratorState has already been"):
        make(NAME, tmp_path / "second", **BF16)
