"""Every option says what becomes of its change on resume, and changes are found key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import Field

from trlx_like.config import METHODS, MethodConfig, Section, TRLConfig
from trlx_like.config.resume import UNDECLARED, Applied, Change, OnResume, differences, record, rule_of


def sections() -> dict[str, type[Section]]:
    """Every section, those of all methods of the package included."""
    methods = {f"method {name}": METHODS.get(name) for name in METHODS.names()}
    own = {name: method for name, method in methods.items() if method.__module__.startswith("trlx_like.")}
    return {**TRLConfig.sections(), **own}


def test_there_are_methods_to_look_at() -> None:
    assert len(sections()) > 18


@pytest.mark.parametrize("section", sections().values(), ids=sections())
def test_every_option_has_a_rule(section: type[Section]) -> None:
    without = [name for name, field in section.model_fields.items() if rule_of(field) is UNDECLARED]
    assert not without, "declare these as Applied[...], OfData[...] or another of trlx_like/config/resume.py"
    reasons = {rule_of(field).refused for field in section.model_fields.values()}
    assert all(reason is None or (len(reason) > 20 and not reason.endswith(".")) for reason in reasons)


def config(**changes: Any) -> TRLConfig:
    values = {
        "model": {"model_path": "m"},
        "method": {"name": "PPOConfig", "gen_kwargs": {"max_new_tokens": 4}},
        "train": {"trainer": "PPOTrainer", "total_steps": 9, "epochs": 1, "batch_size": 4},
        "optimizer": {"name": "adamw", "kwargs": {"lr": 0.1, "betas": [0.9, 0.95]}},
    }
    return TRLConfig.update(values, changes)


def found(before: TRLConfig, after: TRLConfig) -> dict[str, tuple[Any, Any, bool]]:
    """By option: the two values, and whether the change is applied."""
    recorded = json.loads(json.dumps(record(before)))
    return {change.option: (change.was, change.now, change.refused is None) for change in differences(after, recorded)}


def test_what_is_applied_and_what_is_refused() -> None:
    changes = {
        **{"train.total_steps": 10, "train.seed": 2, "train.checkpoint_dir": "x", "train.batch_size": 8},
        **{"optimizer.kwargs.lr": 0.2, "optimizer.kwargs.amsgrad": True, "scheduler.kwargs.factor": 0.5},
        **{"method.cliprange": 0.3, "plugins": []},
    }
    assert found(config(), config(**changes)) == {
        "train.total_steps": (9, 10, True),
        "train.seed": (1000, 2, False),
        "train.batch_size": (4, 8, False),
        "optimizer.kwargs.lr": (0.1, 0.2, True),
        "optimizer.kwargs.amsgrad": (None, True, False),
        "scheduler.kwargs.factor": (None, 0.5, True),
        "method.cliprange": (0.2, 0.3, True),
    }


def test_the_same_options_in_other_words_have_not_changed() -> None:
    assert found(config(), config(**{"train.trainer": "AcceleratePPOTrainer", "train.batch_size": 4})) == {}
    assert not any(option in record(config()) for option in ("train.checkpoint_dir", "train.resume_from_checkpoint"))


def test_a_secret_is_not_recorded() -> None:
    token = f"hf_{'a1' * 12}"
    recorded = json.dumps(record(config(**{"model.model_extra_configs": {"token": token}})))
    assert token not in recorded and "<redacted>" in recorded


def test_another_method_is_one_change() -> None:
    other = config(**{"method": {"name": "SFTConfig"}, "train.trainer": "SFTTrainer"})
    assert found(config(), other) == {
        "method.name": ("PPOConfig", "SFTConfig", False),
        "train.trainer": ("PPOTrainer", "SFTTrainer", False),
    }


def test_an_option_that_is_newer_than_the_checkpoint_had_its_default() -> None:
    recorded = {name: value for name, value in record(config()).items() if name != "train.max_grad_norm"}
    assert list(differences(config(), recorded)) == []
    (change,) = differences(config(**{"train.max_grad_norm": 2.0}), recorded)
    assert change == Change("train.max_grad_norm", 1.0, 2.0)


class PluginConfig(MethodConfig):
    """Options of somebody else's method."""

    plain: int = 1
    said: Applied[float] = Field(default=1.0, gt=0)


def test_a_plugin_that_says_nothing_is_refused_a_change() -> None:
    rules = {name: rule_of(field) for name, field in PluginConfig.model_fields.items()}
    assert rules["plain"] is UNDECLARED and UNDECLARED.refused
    assert rules["said"] == OnResume()


def test_a_change_in_words() -> None:
    assert Change("train.seed", 1, None, "of the seed").words() == ("train.seed", "1 -> null", "refused: of the seed")
    assert Change("train.seed", 1, 2, "of the seed").words(force=True)[2] == "forced, though of the seed"
    assert Change("train.seed", 1, 2).words()[2] == "applied"
