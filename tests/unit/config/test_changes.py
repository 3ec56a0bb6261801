"""Configurations from Python: made, changed, written and read back; methods and trainers from plugins."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import model_validator

from trlx_like.config import (
    METHODS,
    TRAINERS,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    SFTConfig,
    TrainConfig,
    TRLConfig,
    register_method,
    register_trainer,
)
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.presets import default_ppo_config, default_sft_config


class LoadedModel:
    """Looks like a loaded model: it has a `config`."""

    config = object()
    name_or_path = "my/gpt2"


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for registry in (METHODS, TRAINERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_aliases", dict(registry._aliases))


def sentence_of(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


TRAIN = {"total_steps": 10, "seq_length": 64, "epochs": 2, "batch_size": 8, "trainer": "PPOTrainer"}


def test_sections_may_be_objects_or_mappings() -> None:
    model = ModelConfig(model_path=Path("a") / "b")
    config = TRLConfig(method=PPOConfig(ppo_epochs=2), model=model, train=TRAIN, data=None)
    assert config.model is model and model.model_path == str(Path("a") / "b")
    assert config.method.name == "PPOConfig" and config.train == TrainConfig(**TRAIN)
    assert TRLConfig.from_dict(config) is config


def test_errors_from_python_have_the_same_words_without_a_place() -> None:
    assert sentence_of(lambda: PPOConfig(gamma=2, lamm=1)) == (
        "method.gamma: must be a number from 0 to 1, got 2.\nmethod.lamm: unknown key. Did you mean method.lam?"
    )
    values = {"method": {"name": "PPOConfig"}, "model": {"model_path": "a"}, "train": {**TRAIN, "sede": 1}}
    assert sentence_of(lambda: TRLConfig.from_dict(values)) == "train.sede: unknown key. Did you mean train.seed?"
    assert sentence_of(lambda: TRLConfig.from_dict({})).split("\n") == [
        "model: missing section, with at least model_path.",
        "method: missing section, with at least name.",
        "train: missing section, with at least trainer.",
    ]
    assert sentence_of(lambda: TRLConfig.from_dict([1])) == "must be a mapping of settings, got [1]."


def test_assigning_to_a_field_checks_it() -> None:
    config = default_ppo_config()
    assert sentence_of(lambda: setattr(config.train, "seed", "x")) == (
        "train.seed: must be a whole number of at least 0, got 'x'."
    )
    assert sentence_of(lambda: setattr(config.train, "sede", 1)) == (
        "train.sede: unknown key. Did you mean train.seed?"
    )
    assert config.train.seed == 1000
    config.train.minibatch_size = 5
    assert sentence_of(config.check) == "train.minibatch_size: 5 does not divide train.batch_size (32)."
    config.train.batch_size = 10
    config.check()


def test_what_the_method_generates_must_fit_the_sequence() -> None:
    assert sentence_of(lambda: default_sft_config().evolve(train={"seq_length": 40})) == (
        "method.gen_kwargs.max_new_tokens: 40 must be below train.seq_length (40)."
    )


def test_the_users_dicts_are_copied() -> None:
    values = {"method": {"name": "PPOConfig"}, "model": {"model_path": "a"}, "train": dict(TRAIN)}
    values["optimizer"] = {"name": "sgd", "kwargs": {"lr": 1.0, "groups": [{"x": 1}]}}
    before = copy.deepcopy(values)
    config = TRLConfig.from_dict(values)
    config.optimizer.kwargs["groups"][0]["x"] = 2
    config.to_dict()["optimizer"]["kwargs"]["groups"][0]["x"] = 3
    assert values == before and config.optimizer.kwargs["groups"][0]["x"] == 2


def test_other_optimisers_get_no_betas() -> None:
    assert OptimizerConfig(name="sgd").kwargs == {"lr": 3e-5}
    assert OptimizerConfig(name="AdamW_8bit_bnb").kwargs["betas"] == [0.9, 0.95]
    changed = default_ppo_config().evolve(optimizer={"name": "sgd"}, scheduler={"name": "constant"})
    assert (changed.optimizer.kwargs, changed.scheduler.kwargs) == ({"lr": 3e-5}, {})
    same = default_ppo_config().evolve(optimizer={"name": "AdamW", "kwargs": {"lr": 1.0}})
    assert same.optimizer.kwargs == {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}


def test_update_takes_dotted_and_nested_keys() -> None:
    base = default_ppo_config()
    before = base.to_dict()
    changed = TRLConfig.update(
        base,
        {
            "train.seed": 1,
            "train": {"batch_size": 4},
            "method.gen_kwargs.temperature": 0.7,
            "method": {"gen_kwargs.max_new_tokens": 4, "lam": 0.5},
            "model.model_extra_configs": {"device_map": {"model.layers.0": 1}},
        },
    )
    assert base.to_dict() == before
    assert (changed.train.seed, changed.train.batch_size, changed.train.epochs) == (1, 4, 100)
    assert changed.method.to_dict()["gen_kwargs"] == {
        **{"max_new_tokens": 4, "top_k": 0, "top_p": 1.0, "do_sample": True, "temperature": 0.7}
    }
    assert changed.model.model_extra_configs == {"device_map": {"model.layers.0": 1}}
    assert TRLConfig.update(before, {"train.seed": 3}).train.seed == 3
    sections = {"method": base.method, "model": base.model, "train": base.train}
    assert TRLConfig.update(sections, {"method.lam": 0.5}).method == base.evolve(method={"lam": 0.5}).method
    assert base.evolve(method=SFTConfig(), train={"trainer": "SFTTrainer"}).method == SFTConfig()
    assert before == base.to_dict()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train.sede": 1}, "train.sede: unknown key. Did you mean train.seed?"),
        ({"trian.seed": 1}, "trian: unknown section. Did you mean train?"),
        ({"trian": {}}, "trian: unknown section. Did you mean train?"),
        ({"train.seed.x": 1}, "train.seed: must be a whole number of at least 0, got {'x': 1}."),
        ({"train": 3}, "train: must be a mapping of settings, got 3."),
        ({"method.tau": 3}, "method.tau: unknown key. PPOConfig has name, gen_kwargs, "),
        ({"method.name": "SFTConfig", "method.lam": 1.0}, "method.lam: unknown key. SFTConfig has name, "),
    ],
)
def test_update_refuses_unknown_keys_at_any_depth(changes: dict[str, Any], sentence: str) -> None:
    assert sentence_of(lambda: TRLConfig.update(default_ppo_config(), changes)).startswith(sentence)


def test_another_method_starts_from_its_own_defaults() -> None:
    base = default_ppo_config().evolve(method={"gen_kwargs": {"temperature": 0.5}})
    changed = base.evolve(method={"name": "sftconfig", "packing": True}, train={"trainer": "SFTTrainer"})
    assert changed.method == SFTConfig(name="sftconfig", packing=True)
    kept = base.evolve(method={"name": "ppoconfig", "lam": 0.5}).method
    assert isinstance(kept, PPOConfig) and (kept.lam, kept.gen_kwargs["temperature"]) == (0.5, 0.5)


def test_a_model_given_as_an_object_is_kept_but_not_written(tmp_path: Path) -> None:
    model, file = LoadedModel(), tmp_path / "config.yml"
    config = default_sft_config().evolve(
        model={"model_path": model}, method={"formatting_func": len}, train={"tags": ["a"]}
    )
    assert config.evolve(train={"seed": 1}).model.model_path is model
    assert json.loads(str(config))["model"]["model_path"] == "<object LoadedModel of my/gpt2>"
    config.dump_yaml(file)
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "formatting_func" in text)
    assert sentence_of(lambda: TRLConfig.load_yaml(file)).replace(str(file), "config.yml").split("\n") == [
        "config.yml:2: model.model_path: <object LoadedModel of my/gpt2> was given from Python and is not in "
        "this file; set model_path again.",
        f"config.yml:{line}: method.formatting_func: <object len> was given from Python and is not in this file; "
        "set formatting_func again.",
    ]
    again = TRLConfig.load_yaml(file, ["model.model_path=my/gpt2", "method.formatting_func=null"])
    assert (again.model.model_path, again.train.tags) == ("my/gpt2", ["a"])


def test_a_config_class_or_a_number_is_no_model() -> None:
    for wrong in (LoadedModel, 3, None):
        assert sentence_of(lambda wrong=wrong: ModelConfig(model_path=wrong)).startswith(
            "model.model_path: must be a folder, a hub name, a PretrainedConfig or a loaded model, got "
        )


def test_a_real_config_and_dtype_are_written_as_words(tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config

    extra = {"dtype": torch.bfloat16, "path": Path("a"), "size": (1, 2)}
    config = TRLConfig(
        method=PPOConfig(), train=TRAIN, model=ModelConfig(model_path=GPT2Config(), model_extra_configs=extra)
    )
    config.dump_yaml(tmp_path / "x.yml")
    written = yaml.safe_load((tmp_path / "x.yml").read_text())["model"]
    assert written["model_path"] == "<object GPT2Config>"
    assert written["model_extra_configs"] == {"dtype": "bfloat16", "path": "a", "size": [1, 2]}


def test_words_that_yaml_1_1_takes_for_booleans_are_quoted(tmp_path: Path) -> None:
    default_ppo_config().dump_yaml(tmp_path / "x.yml")
    assert yaml.safe_load((tmp_path / "x.yml").read_text())["backend"]["mixed_precision"] == "no"


def test_options_that_do_nothing_are_listed() -> None:
    train = {"entity_name": "e", "group_name": "g", "tags": ["t"], "logging_dir": "l"}
    config = default_ppo_config().evolve(train=train, method={"horizon": 5, "ref_std": 2.0})
    assert config.inert() == [
        *("method.horizon", "method.ref_std", "train.logging_dir"),
        *("train.entity_name", "train.group_name", "train.tags"),
    ]
    acting = config.evolve(train={"tracker": ["WandB", "tensorboard"]}, method={"target": 6.0, "scale_reward": "ref"})
    assert acting.inert() == []


@pytest.mark.parametrize("off", ["ignored", False, None])
def test_scaling_and_clipping_can_be_switched_off_as_in_trlx(off: Any) -> None:
    assert PPOConfig(scale_reward=off).scale_reward is None
    assert PPOConfig(cliprange_reward=0).cliprange_reward is None
    assert PPOConfig(cliprange_reward=False).cliprange_reward is None


@pytest.mark.usefixtures("registries")
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


@pytest.mark.usefixtures("registries")
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


@pytest.mark.usefixtures("registries")
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


def test_a_method_that_is_not_registered_is_refused() -> None:
    class Unregistered(PPOConfig): ...

    def make(method: MethodConfig) -> TRLConfig:
        return TRLConfig(method=method, model={"model_path": "a"}, train=TRAIN)

    assert sentence_of(lambda: make(Unregistered())).startswith("method.name: unknown method 'Unregistered'.")
    assert sentence_of(lambda: make(PPOConfig(name="SFTConfig"))) == (
        "method.name: 'SFTConfig' is not the name of PPOConfig."
    )


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
words = scalars.filter(lambda v: not (isinstance(v, str) and v.lower() in ("yes", "no", "on", "off")))
free = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.recursive(words, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3)),
    max_size=4,
)
changes = st.fixed_dictionaries(
    {},
    optional={
        "train": st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 2**70),
                "run_name": st.none() | st.text(),
                "tags": st.lists(st.text(), max_size=3),
                "trainer_kwargs": free,
                "minibatch_size": st.sampled_from([None, 1, 2, 16]),
            },
        ),
        "method": st.fixed_dictionaries(
            {},
            optional={
                "lam": st.floats(0, 1),
                "init_kl_coef": st.floats(0, 1e300),
                "target": st.none() | st.just(6),
            },
        ),
        "optimizer": st.fixed_dictionaries({"kwargs": free}),
        "backend": st.fixed_dictionaries({"mixed_precision": st.sampled_from(["no", "bf16"])}),
    },
)
BASE = default_ppo_config()


@given(changes)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changes_touch_only_the_copy_and_survive_the_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    base, given_changes = BASE.to_dict(), copy.deepcopy(changes)
    changed = BASE.evolve(**changes)
    assert (BASE.to_dict(), changes) == (base, given_changes)
    assert TRLConfig.from_dict(changed.to_dict()) == changed
    dotted = {f"{s}.{key}": value for s, section in changes.items() for key, value in section.items()}
    assert TRLConfig.update(BASE, dotted) == changed
    changed.dump_yaml(tmp_path / "x.yml")
    assert TRLConfig.load_yaml(tmp_path / "x.yml") == changed
    json.loads(str(changed))
