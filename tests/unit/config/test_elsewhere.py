"""Options of TRL and transformers are refused with the option here, and that one exists."""

from __future__ import annotations

import re

import pytest

from trlx_like import PPOConfig, TRLConfig, default_ppo_config
from trlx_like.config.elsewhere import ELSEWHERE
from trlx_like.errors import ConfigError


def test_every_option_that_is_named_exists() -> None:
    config = default_ppo_config()
    for words in ELSEWHERE.values():
        for section, option in re.findall(
            r"\b(model|method|train|optimizer|scheduler|sampler|backend)\.([a-z_]+)", words
        ):
            assert option in type(getattr(config, section)).model_fields, words
    ours = {name for section in config.to_dict().values() for name in (section if isinstance(section, dict) else {})}
    assert not ours & set(ELSEWHERE)


def test_the_sentence() -> None:
    with pytest.raises(ConfigError, match=r"method.learning_rate: unknown key. Here this is optimizer.kwargs.lr."):
        PPOConfig(learning_rate=1e-5)  # type: ignore[call-arg]
    base = default_ppo_config().to_dict()
    with pytest.raises(
        ConfigError, match=r"train.warmup_ratio: unknown key. Here this is .*num_warmup_steps, of which"
    ):
        TRLConfig.from_dict({**base, "train": {**base["train"], "warmup_ratio": 0.1}})


@pytest.mark.parametrize("name", ["checkpoint_interval", "eval_interval"])
def test_a_share_of_the_steps_is_no_interval(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.{name}: must count optimizer steps, got 0.2; write that share of"):
        default_ppo_config().evolve(train={name: 0.2})
