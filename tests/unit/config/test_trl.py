"""Whole configurations: read from a file, made and changed from Python, written and read back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.unit.config.support import TRAIN, VALID, errors_of, loaded, sentence_of
from trlx_like.config import METHODS, ModelConfig, TrainConfig, TRLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.config.methods.sft import SFTConfig
from trlx_like.config.problems import listed
from trlx_like.presets import default_ppo_config


def test_the_shortest_file_gets_the_defaults(tmp_path: Path) -> None:
    config = loaded(tmp_path, VALID)
    assert config.tokenizer.to_dict() == {
        "tokenizer_path": None,
        "padding_side": "left",
        "truncation_side": "right",
        "tokenizer_extra_configs": {},
        "chat_template": None,
        "chat_template_kwargs": {},
    }
    assert (config.optimizer.name, config.scheduler.name, config.scheduler.kwargs) == (
        "adamw",
        "constant",
        {},
    )
    assert config.optimizer.kwargs == {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}
    assert (config.train.seed, config.train.max_grad_norm, config.train.trackers) == (1000, 1.0, [])
    assert isinstance(config.method, PPOConfig) and config.method.ratio_threshold == 10.0
    assert config.unused_options() == []


TOP = {
    "trian: {}": "trian: unknown section. Did you mean train?",
    "plugins: p.py": "plugins: must be a list of texts, got 'p.py'.",
    "backend: {device: gpu}": "backend.device: must be 'auto' or 'cpu', got 'gpu'.",
    "data: 7": "data: must be a mapping of settings, got 7.",
    "reward: {time_limit: 0}": "reward.time_limit: must be a number above 0 or null, got 0.",
    "reward: {on_error: skip}": "reward.on_error: must be 'raise', 'abstain' or 'value', got 'skip'.",
    "reward: {max_abstained: 1.5}": "reward.max_abstained: must be a number from 0 to 1, got 1.5.",
    "reward: {weights: [a]}": "reward.weights: must be a list or null, got ['a'].",
    "sampler: {engine: 7}": "sampler.engine: must be text, got 7.",
    "optimizer: {kwargs: {amsgrad: no}}": "optimizer.kwargs.amsgrad: 'no' is text here; write true or false.",
    "zzz: {}": (
        "zzz: unknown section. The sections are model, tokenizer, optimizer, scheduler, method, train, data, reward, "
        "sampler, backend and plugins."
    ),
    "plugins: [no_such_mod]": (
        "plugins.0: plugin 'no_such_mod': no module or installed entry point 'no_such_mod'; "
        "for a file give its path, ending in .py."
    ),
    "tokenizer: {tokenizer_path: 1}": (
        "tokenizer.tokenizer_path: must be a folder, a hub name, a loaded tokenizer or null, got 1."
    ),
    "scheduler: {nam: linear}": "scheduler.nam: unknown key. Did you mean scheduler.name?",
    "scheduler: {x: 1}": "scheduler.x: unknown key. SchedulerConfig has name, kwargs, warmup.",
}


@pytest.mark.parametrize(("setting", "sentence"), TOP.items())
def test_errors_of_sections(tmp_path: Path, setting: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID + f"{setting}\n") == [f"x.yml:11: {sentence}"]


MODEL_PATH = "a folder, a hub name, a PretrainedConfig or a loaded model"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  epochs: 2\n", "", "x.yml:3: train.epochs: missing. It must be a whole number of at least 1."),
        ("  name: PPOConfig", "", f"x.yml:9: method.name: missing. It must be {listed(METHODS.names())}."),
        ("  model_path: gpt2\n", "", f"x.yml:1: model.model_path: missing. It must be {MODEL_PATH}."),
        ("gpt2", "5", f"x.yml:2: model.model_path: must be {MODEL_PATH}, got 5."),
        ("gpt2", "' '", f"x.yml:2: model.model_path: must be {MODEL_PATH}, got ' '."),
        ("model:\n  model_path:", "model:", "x.yml:1: model: must be a mapping of settings, got 'gpt2'."),
        ("model:\n  model_path: gpt2\n", "", "x.yml: model: missing section, with at least model_path."),
        ("method:\n  name: PPOConfig\n", "", "x.yml: method: missing section, with at least name."),
        ("64", "40", "x.yml:9: method.gen_kwargs.max_new_tokens: 40 must be below train.seq_length (40)."),
        ("PPOConfig", "3", "x.yml:10: method.name: the name of a method is text, got 3."),
        ("epochs: 2", "epochs: 2\n  epochs: 3", "x.yml:7: train.epochs: given twice, first on line 6."),
        ("epochs: 2", "epochs: 2\n  [a]: 2", "x.yml:7: train: a key must be text."),
        (
            "epochs: 2",
            "epochs: 2\n  tags: [a",
            "x.yml:8: is not valid YAML: expected ',' or ']', but got ':'.",
        ),
    ],
)
def test_errors_of_what_is_missing_or_malformed(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert VALID.count(old) == 1
    assert errors_of(tmp_path, VALID.replace(old, new)) == [sentence]


def test_sections_may_be_objects_or_mappings() -> None:
    model = ModelConfig(model_path=Path("a") / "b")
    config = TRLConfig(method=PPOConfig(ppo_epochs=2), model=model, train=TRAIN, data=None)
    assert config.model is model and model.model_path == str(Path("a") / "b")
    assert config.method.name == "PPOConfig" and config.train == TrainConfig(**TRAIN)
    same: Any = config
    assert TRLConfig.from_dict(same) is config


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
        ({"train.seed.x": 1}, "train.seed: must be a whole number from 0 to 4294967295, got {'x': 1}."),
        ({"train": 3}, "train: must be a mapping of settings, got 3."),
        ({"method.tau": 3}, "method.tau: unknown key. PPOConfig has name, gen_kwargs, "),
        ({"method.name": "SFTConfig", "method.lam": 1.0}, "method.lam: unknown key. SFTConfig has name, "),
    ],
)
def test_update_refuses_unknown_keys_at_any_depth(changes: dict[str, Any], sentence: str) -> None:
    assert sentence_of(lambda: TRLConfig.update(default_ppo_config(), changes)).startswith(sentence)


def test_words_that_yaml_1_1_takes_for_booleans_are_quoted(tmp_path: Path) -> None:
    default_ppo_config().dump_yaml(tmp_path / "x.yml")
    assert yaml.safe_load((tmp_path / "x.yml").read_text())["backend"]["mixed_precision"] == "no"


def test_options_that_do_nothing_are_listed() -> None:
    train = {"entity_name": "e", "group_name": "g", "tags": ["t"], "logging_dir": "l"}
    config = default_ppo_config().evolve(train=train, method={"horizon": 5, "ref_std": 2.0})
    assert config.unused_options() == [
        *("method.horizon", "method.ref_std", "train.logging_dir"),
        *("train.entity_name", "train.group_name", "train.tags"),
    ]
    acting = config.evolve(train={"tracker": ["WandB", "tensorboard"]}, method={"target": 6.0, "scale_reward": "ref"})
    assert acting.unused_options() == []


LETTERS = st.characters(codec="utf-8", exclude_characters="\0")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(LETTERS, max_size=8)
)


words = scalars.filter(lambda v: not (isinstance(v, str) and v.lower() in ("yes", "no", "on", "off")))


free = st.dictionaries(
    st.text(LETTERS, min_size=1, max_size=8),
    st.recursive(
        words, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=4), v, max_size=3)
    ),
    max_size=4,
)


changes = st.fixed_dictionaries(
    {},
    optional={
        "train": st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 2**32 - 1),
                "run_name": st.none() | st.text(LETTERS),
                "tags": st.lists(st.text(LETTERS), max_size=3),
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
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
