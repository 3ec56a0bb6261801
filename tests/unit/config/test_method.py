"""A method's section stands for a registered method, and starts from that method's defaults."""

from __future__ import annotations

from tests.unit.config.support import TRAIN, sentence_of
from trlx_like.config import MethodConfig, TRLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.presets import default_ppo_config


def test_another_method_starts_from_its_own_defaults() -> None:
    base = default_ppo_config().evolve(method={"gen_kwargs": {"temperature": 0.5}})
    changed = base.evolve(method={"name": "sftconfig", "packing": True}, train={"trainer": "SFTTrainer"})
    assert changed.method == SFTConfig(name="sftconfig", packing=True)
    kept = base.evolve(method={"name": "ppoconfig", "lam": 0.5}).method
    assert isinstance(kept, PPOConfig) and (kept.lam, kept.gen_kwargs["temperature"]) == (0.5, 0.5)


def test_a_method_that_is_not_registered_is_refused() -> None:
    class Unregistered(PPOConfig): ...

    def make(method: MethodConfig) -> TRLConfig:
        return TRLConfig(method=method, model={"model_path": "a"}, train=TRAIN)

    assert sentence_of(lambda: make(Unregistered())).startswith("method.name: unknown method 'Unregistered'.")
    assert sentence_of(lambda: make(PPOConfig(name="SFTConfig"))) == (
        "method.name: 'SFTConfig' is not the name of PPOConfig."
    )
