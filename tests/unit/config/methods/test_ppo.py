"""What PPO's section may say, and the sentence for everything it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.support import VALID, errors_of
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.errors import ConfigError

METHOD = {
    "gamma: 2": "gamma: must be a number from 0 to 1, got 2.",
    "kl_penalty: k3": "kl_penalty: must be 'kl', 'abs', 'mse' or 'full', got 'k3'.",
    "kl_in: value": "kl_in: must be 'loss' or 'reward', got 'value'.",
    "scale_reward: whiten": "scale_reward: must be 'running', 'ref' or null, got 'whiten'.",
    "cliprange_reward: -1": "cliprange_reward: must be a number above 0 or null, got -1.",
    "norm_reward: true": "norm_reward: true needs method.scale_reward (null) to be 'running' or 'ref'.",
    "gen_kwargs: 5": "gen_kwargs: must be a mapping of settings, got 5.",
    "gen_kwargs: {}": "gen_kwargs.max_new_tokens: missing. It must be a whole number of at least 1.",
    "gen_kwargs: {max_new_tokens: 0}": ("gen_kwargs.max_new_tokens: must be a whole number of at least 1, got 0."),
    "gen_kwargs: {max_new_tokens: 64}": ("gen_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."),
    "gen_kwargs: {max_new_tokens: 4, max_length: 9}": (
        "gen_kwargs.max_length: 9 is refused: it counts the prompt as well; use max_new_tokens."
    ),
    "gen_kwargs: {max_new_tokens: 4, temperature: 0}": ("gen_kwargs.temperature: must be a number above 0, got 0."),
    "gen_experience_kwargs: {max_new_tokens: 64}": (
        "gen_experience_kwargs.max_new_tokens: 64 must be below train.seq_length (64)."
    ),
    "gen_experience_kwargs: {max_new_tokens: 4, repetition_penalty: 1.1}": (
        "gen_experience_kwargs.repetition_penalty: 1.1 samples text in a way the loss cannot account for; use 1.0 or "
        "null."
    ),
    "gen_experience_kwargs: {max_new_tokens: 4, temperature: [1, 2]}": (
        "gen_experience_kwargs.temperature: [1, 2] is a sweep; text to train on needs one value."
    ),
}


@pytest.mark.parametrize(("setting", "sentence"), METHOD.items())
def test_errors_of_the_method(tmp_path: Path, setting: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID + f"  {setting}\n") == [f"x.yml:11: method.{sentence}"]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"target": 1.0}, "method.target adapts the KL weight to responses of the present policy"),
        ({"rollout_correction": "token"}, "method.rollout_correction cannot correct a response of an earlier policy"),
        ({"gen_kwargs": {"max_new_tokens": 4, "top_k": 5}}, "may have tokens that top_k forbids by now"),
    ],
)
def test_what_earlier_responses_cannot_be_mixed_with(option: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"method.replay_best: .*{sentence}"):
        PPOConfig(replay_best=True, **option)


@pytest.mark.parametrize("off", ["ignored", False, None])
def test_scaling_and_clipping_can_be_switched_off_as_in_trlx(off: Any) -> None:
    assert PPOConfig(scale_reward=off).scale_reward is None
    assert PPOConfig(cliprange_reward=0).cliprange_reward is None
    assert PPOConfig(cliprange_reward=False).cliprange_reward is None
