"""Options of TRL and transformers are refused with the option here, and that one exists."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import trlx_like
from tests.contract.recipes import make
from trlx_like import PPOConfig, TRLConfig, default_ppo_config
from trlx_like.config import METHODS
from trlx_like.config.elsewhere import TABLES, answers
from trlx_like.config.yaml_source import packaged
from trlx_like.errors import ConfigError

OPTIONS, ARGUMENTS, CALLS = (answers(kind) for kind in ("options", "arguments", "methods"))


def test_every_option_that_is_named_exists() -> None:
    sections: dict[str, set[str]] = {name: set(kind.model_fields) for name, kind in TRLConfig.sections().items()}
    sections["method"] = {field for name in METHODS.names() for field in METHODS.get(name).model_fields}
    for words in [*OPTIONS.values(), *ARGUMENTS.values()]:
        for section, option in re.findall(rf"\b({'|'.join(sections)})\.([a-z_]+)", words):
            assert option in sections[section], words
    assert not set().union(*(fields for name, fields in sections.items() if name != "method")) & set(OPTIONS)


@pytest.mark.parametrize("kind", [kind for kind in packaged(TABLES) if not kind.startswith("trlx_")])
def test_a_name_has_one_answer(kind: str) -> None:
    names = [name for entry in packaged(TABLES)[kind].values() for name in entry.split()]
    assert sorted(names) == sorted(answers(kind))


def test_the_sentence() -> None:
    with pytest.raises(ConfigError, match=r"method.learning_rate: unknown key. Here this is optimizer.kwargs.lr."):
        PPOConfig(learning_rate=1e-5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"method.tracker_kwargs: unknown key. Did you mean train.tracker_kwargs\?"):
        PPOConfig(tracker_kwargs={})  # type: ignore[call-arg]
    base = default_ppo_config().to_dict()
    with pytest.raises(ConfigError, match=r"train.warmup_ratio: unknown key. Here this is scheduler.warmup, of which"):
        TRLConfig.from_dict({**base, "train": {**base["train"], "warmup_ratio": 0.1}})


@pytest.mark.parametrize("name", OPTIONS)
def test_every_name_is_answered(name: str) -> None:
    kind: Any = next(METHODS.get(method) for method in METHODS.names() if name not in METHODS.get(method).model_fields)
    with pytest.raises(ConfigError, match=rf"^method.{name}: unknown key. Here this is {re.escape(OPTIONS[name])}"):
        kind(**{name: None})


@pytest.mark.parametrize("name", ["checkpoint_interval", "eval_interval"])
def test_a_share_of_the_steps_is_no_interval(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"train.{name}: must count optimizer steps, got 0.2; write that share of"):
        default_ppo_config().evolve(train={name: 0.2})


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make("PPOTrainer", tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(("name", "words"), CALLS.items())
def test_methods_of_other_trainers(name: str, words: str, trainer: Any) -> None:
    with pytest.raises(AttributeError, match=rf"^PPOTrainer has no {name}\. Here this is {re.escape(words)}"):
        getattr(trainer, name)
    if here := re.match(r"(?!train\.)([a-z_.]+)(\(|,|$)", words):
        for part in here[1].split("."):
            trainer = getattr(trainer, part)
    assert here or words.startswith(("not needed", "train.push_to_hub", "the ", "`trlx-like"))


def test_other_missing_attributes_are_those_of_python(trainer: Any) -> None:
    assert not hasattr(trainer, "nothing") and not hasattr(trainer, "train")
    with pytest.raises(AttributeError, match="'PPOTrainer' object has no attribute 'nothing'"):
        trainer.nothing  # noqa: B018


@pytest.mark.parametrize(("name", "words"), [*ARGUMENTS.items(), ("learning_rate", "optimizer.kwargs.lr")])
def test_arguments_of_other_libraries(name: str, words: str) -> None:
    given: dict[str, Any] = {name: None, "prompts": []}
    with pytest.raises(ConfigError, match=rf"^train takes no {name}. Here this is {re.escape(words)}"):
        trlx_like.train(**given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seed", "the option train.seed of config="),
        ("beta", "the option method.beta of config="),
        ("generate_during_eval", "the option method.generate_during_eval of config="),
        ("method", "a section of config=, as in config.evolve(method={...})"),
    ],
)
def test_an_option_as_an_argument(name: str, words: str) -> None:
    given: dict[str, Any] = {name: None, "prompts": []}
    with pytest.raises(ConfigError, match=rf"^train takes no {name}. Here this is {re.escape(words)}\.$"):
        trlx_like.train(**given)


def test_other_arguments_are_mistakes_of_python() -> None:
    given: dict[str, Any] = {"promts": []}
    with pytest.raises(TypeError, match="promts"):
        trlx_like.train(**given)


def test_every_argument_that_is_named_exists() -> None:
    taken = set(inspect.signature(trlx_like.train).parameters)
    assert not taken & set(ARGUMENTS)
    for words in ARGUMENTS.values():
        assert set(re.findall(r"\b(\w+)=(?!\.)", words)) <= taken, words


def test_a_trainer_that_is_made_with_an_argument_of_another_library() -> None:
    given: dict[str, Any] = {"train_dataset": [], "model": "gpt2"}
    with pytest.raises(ConfigError, match=r"PPOTrainer cannot use model, train_dataset; .* model: here this is"):
        trlx_like.PPOTrainer(default_ppo_config(), **given)


@pytest.mark.parametrize(
    ("positional", "named", "message"),
    [
        (
            ("gpt2", None),
            {"args": None, "beta": 0.1},
            r"\(str, NoneType\), and all else by name. args: here this is con",
        ),
        (
            (),
            {"model": "gpt2", "train_dataset": []},
            r"\(nothing\), .* model: here this is model_path=.* train_dataset:",
        ),
        ((), {"config": PPOConfig()}, r"\(PPOConfig\), and all else by name.$"),
    ],
)
def test_a_trainer_that_is_made_in_the_shape_of_another_library(
    positional: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^DPOTrainer takes one TRLConfig, not {message}"):
        trlx_like.DPOTrainer(*positional, **named)
