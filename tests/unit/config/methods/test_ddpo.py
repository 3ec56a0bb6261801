"""Options of DDPO that cannot go together, do nothing, or want another model."""

from __future__ import annotations

from typing import Any

import pytest

from trlx_like.config import TRLConfig
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.errors import ConfigError

METHOD_PROBLEMS = {
    "method.num_generations: 3 does not divide num_samples (256).": {"num_generations": 3},
    "method.num_generations: 1 leaves nothing to compare an image with; use 2 or more.": {"advantages": "group"},
    "method.stat_min_count: 16 is above method.stat_buffer_size (4) and never reached.": {"stat_buffer_size": 4},
    "method.inner_epochs: 2 passes need a ratio; use 1 or loss_type clip.": {
        "loss_type": "score_function",
        "inner_epochs": 2,
    },
}


@pytest.mark.parametrize(("message", "options"), list(METHOD_PROBLEMS.items()), ids=str)
def test_options_that_cannot_go_together(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        DDPOConfig(**options)
    assert str(error.value) == message


def test_what_does_nothing_is_named() -> None:
    quiet = DDPOConfig(guidance_scale=1.0, negative_prompt="x", train_cfg=False, advantages="round", stat_min_count=3)
    assert quiet.unused_options() == ["stat_min_count", "negative_prompt", "train_cfg"]
    assert DDPOConfig(guidance_gradient=False).unused_options() == []
    assert DDPOConfig(guidance_gradient=False, train_cfg=False).unused_options() == ["guidance_gradient"]


def test_models_and_methods_that_do_not_fit() -> None:
    train = {"total_steps": 1, "epochs": 1, "batch_size": 1}
    for kind, method, message in (
        ("causal", "DDPO", "model.model_arch_type: 'causal' cannot be trained by DDPOConfig; use 'diffusion'."),
        (
            "diffusion",
            "PPO",
            "model.model_arch_type: 'diffusion' cannot be trained by PPOConfig; use causal or seq2seq.",
        ),
    ):
        sections = {"model": {"model_path": "x", "model_arch_type": kind}, "method": {"name": f"{method}Config"}}
        with pytest.raises(ConfigError) as error:
            TRLConfig.from_dict({**sections, "train": {**train, "trainer": f"{method}Trainer"}})
        assert str(error.value).replace("use diffusion", "use 'diffusion'") == message


def test_options_of_text_models_are_refused() -> None:
    sections: dict[str, Any] = {
        "model": {"model_path": "x", "model_arch_type": "diffusion"},
        "method": {"name": "DDPOConfig"},
    }
    sections["train"] = {"total_steps": 1, "epochs": 1, "batch_size": 1, "trainer": "DDPOTrainer"}
    for name, value, shown in (("num_layers_unfrozen", 2, "2"), ("ref_model_path", "y", "'y'")):
        with pytest.raises(ConfigError) as error:
            TRLConfig.update(sections, {f"model.{name}": value})
        assert str(error.value) == (
            f"model.{name}: {shown} is not for images: all of the model or a LoRA is trained, and held close to its "
            "start."
        )
