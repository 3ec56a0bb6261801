"""Names of methods and trainers: the package's, those of plugins, and unknown ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import model_validator

from tests.unit.config.support import TRAIN, VALID, errors_of, sentence_of
from trlx_like.config import (
    METHODS,
    TRAINERS,
    MethodConfig,
    TRLConfig,
    register_method,
    register_trainer,
)
from trlx_like.errors import RegistryError


def test_a_method_or_trainer_that_is_not_registered(tmp_path: Path) -> None:
    lines = errors_of(tmp_path, VALID.replace("PPOConfig", "PPOConfg").replace("PPOTrainer", "PPOTrainr"))
    assert lines == [
        "x.yml:8: train.trainer: unknown trainer 'PPOTrainr'. Did you mean PPOTrainer? Known: "
        f"{', '.join(TRAINERS.names())}.",
        "x.yml:10: method.name: unknown method 'PPOConfg'. Did you mean PPOConfig? Known: "
        f"{', '.join(METHODS.names())}.",
    ]


def test_a_method_and_a_trainer_of_ones_own() -> None:
    @register_method("mine", aliases=["my_old_name"])
    class MyConfig(MethodConfig):
        alpha: float = 0.1
        gen_kwargs: dict[str, Any] = {}

        @model_validator(mode="after")
        def _small(self) -> MyConfig:
            if self.alpha > 1:
                raise ValueError(f"method.alpha ({self.alpha}) is large.")
            return self

    @register_trainer
    class MyTrainer: ...

    config = TRLConfig(method=MyConfig(), model={"model_path": "a"}, train={**TRAIN, "trainer": "mytrainer"})
    assert config.method.name == "mine"
    assert config.evolve(method={"alpha": 1}).method.to_dict() == {"name": "mine", "alpha": 1.0, "gen_kwargs": {}}
    assert sentence_of(lambda: config.evolve(method={"gen_kwargs": {"max_new_tokens": "x"}})) == (
        "method.gen_kwargs.max_new_tokens: must be a whole number of at least 1, got 'x'."
    )
    assert config.evolve(method={"name": "MY_OLD_NAME"}).method.name == "MY_OLD_NAME"
    assert sentence_of(lambda: MyConfig(alpha=2)) == "method: method.alpha (2.0) is large."
    assert sentence_of(lambda: config.evolve(method={"alpah": 2})) == (
        "method.alpah: unknown key. Did you mean method.alpha?"
    )


def test_a_plugin_of_the_file_brings_its_method(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "from trlx_like.config import TextMethodConfig, register_method, register_trainer\n"
        "@register_method\nclass PluginConfig(TextMethodConfig):\n    alpha: float = 0.1\n"
        "@register_trainer\nclass PluginTrainer: ...\n"
    )
    values = {
        "plugins": [str(tmp_path / "plugin.py")],
        "method": {"name": "PluginConfig", "alpha": 0.2},
        "model": {"model_path": "a"},
        "train": {**TRAIN, "trainer": "PluginTrainer"},
    }
    assert TRLConfig.from_dict(values).method.to_dict()["alpha"] == 0.2


def test_what_is_no_method_cannot_be_registered() -> None:
    drop = "is a MethodConfig, which declares its fields by itself: drop @dataclass."
    with pytest.raises(RegistryError, match=f"Under {drop}"):

        @register_method
        @dataclass
        class Under(MethodConfig):
            alpha: float = 0.1

    @dataclass
    @register_method
    class Above(MethodConfig):
        alpha: float = 0.1

    values = {"method": {"name": "Above"}, "model": {"model_path": "a"}, "train": TRAIN}
    assert sentence_of(lambda: TRLConfig.from_dict(values)) == f"method.name: Above {drop}"
    with pytest.raises(RegistryError, match="register_method needs a subclass of MethodConfig, got <class 'int'>"):
        register_method(int)
    with pytest.raises(RegistryError, match="register_trainer needs a class, got 3"):
        register_trainer()(3)
